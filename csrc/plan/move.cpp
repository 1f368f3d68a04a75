#include "plan/move.h"

#include <algorithm>
#include <deque>
#include <limits>
#include <utility>

#include "plan/constants.h"
#include "plan/simulate.h"

namespace memsave_ext::plan {
namespace {

// By moment, the seconds from the step's beginning on, as far as its operators tell.
std::vector<double> clock_of(const Trace& trace) {
  const auto forward = static_cast<size_t>(std::max(trace.forward, 1));
  std::vector<double> clock(trace.moments.size());
  std::vector<size_t> ends(trace.calls.size());
  for (size_t i = 0; i < trace.calls.size(); ++i) {
    ends[i] = std::min(static_cast<size_t>(trace.calls[i].moment), forward - 1);
    clock[ends[i]] += trace.calls[i].seconds + kSecondsPerCall;
  }
  for (size_t i = 1; i < std::min(forward, clock.size()); ++i) clock[i] += clock[i - 1];
  const double all = clock[std::min(forward, clock.size()) - 1];
  for (const auto& content : trace.contents) {
    if (content.opened < trace.forward || content.call < 0) continue;
    double& time = clock[content.opened];
    time = std::max(time, all + kBackward * (all - clock[ends[content.call]]));
  }
  for (size_t i = forward; i < clock.size(); ++i) clock[i] = std::max(clock[i], clock[i - 1]);
  return clock;
}

// Copies of one kind, one after the other.
struct Way {
  double bytes_per_second, free_from = 0;

  // Returns when a copy is over that may begin at `now`.
  double copy(double now, int64_t bytes) {
    free_from = std::max(now, free_from) + static_cast<double>(bytes) / bytes_per_second;
    return free_from;
  }
};

// Schedules the copies of a step that was simulated with these contents moved.
class Scheduler {
 public:
  Scheduler(const Trace& trace, const std::vector<double>& clock, const Simulator& simulator,
            const std::vector<Decision>& decisions, int64_t level, store::Speed speed)
      : trace_(trace),
        clock_(clock),
        timeline_(simulator.timeline()),
        decisions_(decisions),
        level_(level),
        speed_(speed),
        memory_(simulator.memory()),
        first_back_(simulator.first_back()) {}

  Bus::Cost cost() {
    begin_back();
    level_ = memory_.empty() ? 0 : *std::max_element(memory_.begin(), memory_.end());
    const auto moments = static_cast<int32_t>(trace_.moments.size());
    room_.assign(moments + 1, std::numeric_limits<int64_t>::max());
    for (int32_t i = moments; i-- > 0;) {
      int64_t most = memory_[timeline_.before[i]];
      if (i > 0) most = std::max(most, memory_[timeline_.at[i - 1]]);
      room_[i] = std::max<int64_t>(level_ - most, 0);
      // In backward it is looked at where a content is opened, for all until the next one.
      const bool is_looked_at = i < trace_.forward || timeline_.at[i] != timeline_.before[i];
      if (!is_looked_at) room_[i] = std::min(room_[i], room_[i + 1]);
    }
    wait();
    return {level_, made_.waiting};
  }

  Schedule schedule() {
    cost();
    const auto moments = static_cast<int32_t>(trace_.moments.size());
    made_.room_before.assign(room_.begin(), room_.begin() + trace_.forward + 1);
    made_.room_after.resize(trace_.contents.size(), std::numeric_limits<int64_t>::max());
    made_.back.resize(trace_.contents.size());
    std::vector<int32_t> opened(moments, -1);
    for (size_t i = 0; i < trace_.contents.size(); ++i) {
      const int32_t moment = trace_.contents[i].opened;
      if (moment < trace_.forward) continue;
      opened[moment] = static_cast<int32_t>(i);
      made_.room_after[i] = room_[moment + 1];
    }
    for (const auto& [moment, content] : back_) {
      if (opened[moment] >= 0) made_.back[opened[moment]].push_back(content);
    }
    return std::move(made_);
  }

 private:
  struct Need {
    int32_t moment, content;
  };

  // Decides when copies back begin: as late as they may, and no earlier than there is room.
  void begin_back() {
    std::vector<int32_t> moment_of(memory_.size(), -1), openings;
    for (size_t i = 0; i < trace_.moments.size(); ++i) {
      if (timeline_.at[i] == timeline_.before[i]) continue;
      moment_of[timeline_.at[i]] = static_cast<int32_t>(i);
      openings.push_back(static_cast<int32_t>(i));
    }
    for (size_t i = 0; i < decisions_.size(); ++i) {
      if (!is_moved(decisions_[i]) || first_back_[i] < 0 || moment_of[first_back_[i]] < 0) continue;
      needs_.push_back({moment_of[first_back_[i]], static_cast<int32_t>(i)});
    }
    std::stable_sort(needs_.begin(), needs_.end(),
                     [](const Need& a, const Need& b) { return a.moment < b.moment; });
    std::vector<double> latest(needs_.size());
    double next = std::numeric_limits<double>::infinity();
    for (size_t i = needs_.size(); i-- > 0;) {
      const double takes =
          static_cast<double>(trace_.contents[needs_[i].content].bytes) / speed_.back;
      next = latest[i] = std::min(clock_[needs_[i].moment], next) - kEarly * takes;
    }
    for (size_t i = 0; i < needs_.size(); ++i) {
      const auto [moment, content] = needs_[i];
      if (decisions_[content] == Decision::kMoveTwice) continue;
      const int64_t bytes = trace_.contents[content].bytes;
      const int32_t needed = timeline_.at[moment];
      auto first = std::lower_bound(openings.begin(), openings.end(), moment);
      int32_t from = needed;
      while (first != openings.begin()) {
        const int32_t earlier = *std::prev(first);
        const int32_t slot = timeline_.at[earlier];
        const auto fits = [&](int64_t memory) { return memory + bytes <= level_; };
        if (!std::all_of(memory_.begin() + slot, memory_.begin() + from, fits)) break;
        from = slot;
        --first;
        if (clock_[earlier] <= latest[i]) break;
      }
      if (from == needed) continue;
      for (int32_t slot = from; slot < needed; ++slot) memory_[slot] += bytes;
      back_.push_back({*first, content});
    }
    std::stable_sort(back_.begin(), back_.end(),
                     [](const auto& a, const auto& b) { return a.moment < b.moment; });
  }

  // Finds how long the step waits.
  void wait() {
    struct Leaving {
      double over;
      int32_t lingers_from;
      int64_t bytes;
    };
    std::vector<std::vector<int32_t>> made_at(trace_.moments.size());
    for (size_t i = 0; i < decisions_.size(); ++i) {
      if (!is_moved(decisions_[i])) continue;
      const auto& content = trace_.contents[i];
      const int32_t moment = content.decided >= 0 ? content.decided : content.let_go;
      // Of a block that records no operator the forward has no moment.
      made_at[std::max(std::min(moment, trace_.forward - 1), 0)].push_back(static_cast<int32_t>(i));
    }
    Way out{speed_.out}, back{speed_.back};
    std::deque<Leaving> leaving;
    std::vector<double> comes(trace_.contents.size(), -1);
    size_t next_back = 0, next_need = 0;
    double delay = 0;
    const auto moments = static_cast<int32_t>(trace_.moments.size());
    for (int32_t i = 0; i < moments; ++i) {
      double now = clock_[i] + delay;
      const auto wait_until = [&](double time) {
        if (time <= now) return;
        made_.waiting += time - now;
        delay += time - now;
        now = time;
      };
      for (const int32_t content : made_at[i]) {
        const auto& c = trace_.contents[content];
        leaving.push_back({out.copy(now, c.bytes), c.let_go, c.bytes});
      }
      for (; next_back < back_.size() && back_[next_back].moment <= i; ++next_back) {
        const int32_t content = back_[next_back].content;
        comes[content] = back.copy(now, trace_.contents[content].bytes);
      }
      while (!leaving.empty() && leaving.front().over <= now) leaving.pop_front();
      const int64_t room = room_[i + 1];
      const auto linger = [&] {
        int64_t bytes = 0;
        for (const auto& each : leaving) bytes += each.lingers_from <= i ? each.bytes : 0;
        return bytes;
      };
      while (!leaving.empty() && linger() > room) {
        wait_until(leaving.front().over);
        leaving.pop_front();
      }
      for (; next_need < needs_.size() && needs_[next_need].moment <= i; ++next_need) {
        const int32_t content = needs_[next_need].content;
        if (comes[content] < 0) comes[content] = back.copy(now, trace_.contents[content].bytes);
        wait_until(comes[content]);
      }
    }
  }

  const Trace& trace_;
  const std::vector<double>& clock_;
  const Timeline& timeline_;
  const std::vector<Decision>& decisions_;
  int64_t level_;
  const store::Speed speed_;
  std::vector<int64_t> memory_;  // by slot, with what is on its way back
  const std::vector<int32_t>& first_back_;
  std::vector<Need> needs_, back_;
  std::vector<int64_t> room_;  // by moment, before it
  Schedule made_;
};

}  // namespace

Bus::Bus(const Trace& trace, store::Speed speed)
    : trace_(trace), speed_(speed), clock_(clock_of(trace)) {}

Schedule Bus::schedule(const Simulator& simulator, const std::vector<Decision>& decisions,
                       int64_t level) const {
  return Scheduler(trace_, clock_, simulator, decisions, level, speed_).schedule();
}

Bus::Cost Bus::cost(const Simulator& simulator, const std::vector<Decision>& decisions,
                    int64_t level) const {
  return Scheduler(trace_, clock_, simulator, decisions, level, speed_).cost();
}

}  // namespace memsave_ext::plan
