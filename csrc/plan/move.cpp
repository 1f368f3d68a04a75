#include "plan/move.h"

#include <algorithm>
#include <deque>
#include <limits>
#include <utility>

#include "locks.h"
#include "plan/constants.h"
#include "plan/plan.h"
#include "plan/simulate.h"

namespace memsave_ext::plan {
namespace {

bool can_be_moved(const TraceContent& content) {
  return content.saved && content.let_go >= 0 && content.bytes >= kLeastMoved;
}

// Returns the trace with a call for each of these contents, which makes it and reads nothing.
// Calls stay in an order in which contents come after what they are made of.
Trace with_calls_for(const Trace& trace, const std::vector<uint8_t>& moved,
                     const std::vector<double>& seconds) {
  const auto calls = static_cast<int32_t>(trace.calls.size());
  // By call of the trace: the contents whose own calls come after it; the last ones before it.
  std::vector<std::vector<int32_t>> after(calls), before(calls + 1);
  std::vector<int32_t> first_read(trace.contents.size(), calls);
  for (int32_t i = calls; i-- > 0;) {
    for (const int32_t read : trace.calls[i].reads) first_read[read] = i;
  }
  for (size_t i = 0; i < moved.size(); ++i) {
    if (!moved[i]) continue;
    const int32_t call = trace.contents[i].call;
    (call >= 0 ? after[call] : before[first_read[i]]).push_back(static_cast<int32_t>(i));
  }
  Trace made = trace;
  made.calls.clear();
  const auto add_for = [&](int32_t content) {
    TraceCall& call = made.calls.emplace_back();
    call.seconds = seconds[content];
    call.makes.push_back(content);
    call.moment = std::max<int32_t>(trace.contents[content].let_go, 0);
    made.contents[content].call = static_cast<int32_t>(made.calls.size()) - 1;
    made.contents[content].must_be_kept = false;
  };
  for (int32_t i = 0; i <= calls; ++i) {
    for (const int32_t content : before[i]) add_for(content);
    if (i == calls) break;
    const auto number = static_cast<int32_t>(made.calls.size());
    TraceCall call = trace.calls[i];
    // Where it is repeated for its other results, it makes these for nothing.
    const auto makes = call.makes;
    const auto writes = call.writes;
    call.makes.clear();
    call.writes.clear();
    for (size_t j = 0; j < makes.size(); ++j) {
      if (moved[makes[j]]) {
        call.temporary += trace.contents[makes[j]].bytes;
        continue;
      }
      call.makes.push_back(makes[j]);
      if (j < writes.size()) call.writes.push_back(writes[j]);
      int32_t& made_by = made.contents[makes[j]].call;
      if (made_by >= 0) made_by = number;
    }
    made.calls.push_back(std::move(call));
    for (const int32_t content : after[i]) add_for(content);
  }
  return made;
}

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
struct Bus {
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
        first_made_(simulator.first_made()) {}

  Schedule schedule() {
    begin_back();
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
      if (!is_moved(decisions_[i]) || first_made_[i] < 0 || moment_of[first_made_[i]] < 0) continue;
      needs_.push_back({moment_of[first_made_[i]], static_cast<int32_t>(i)});
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
      made_at[std::min(moment, trace_.forward - 1)].push_back(static_cast<int32_t>(i));
    }
    Bus out{speed_.out}, back{speed_.back};
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

  const Trace& trace_;  // without calls for what is moved
  const std::vector<double>& clock_;
  const Timeline& timeline_;
  const std::vector<Decision>& decisions_;
  const int64_t level_;
  const store::Speed speed_;
  std::vector<int64_t> memory_;  // by slot, with what is on its way back
  const std::vector<int32_t>& first_made_;
  std::vector<Need> needs_, back_;
  std::vector<int64_t> room_;  // by moment, before it
  Schedule made_;
};

std::vector<double> all(const Trace& trace, double seconds) {
  return std::vector<double>(trace.contents.size(), seconds);
}

class MovePlanner {
 public:
  MovePlanner(const Trace& trace, store::Speed speed, int64_t most_moved)
      : trace_(trace), speed_(speed), most_moved_(most_moved), clock_(clock_of(trace)) {}

  std::vector<Plan> plans(const std::vector<Plan>& recompute) {
    found_ = recompute;
    if (speed_.out <= 0 || speed_.back <= 0) return found_;
    // Everything is moved; or what is not recomputed sooner, with a bus that is always busy and
    // with one that is nearly idle.
    try_moving(std::numeric_limits<double>::infinity(), 1);
    try_moving(1, 1);
    try_moving(10, 0.1);
    keep_frontier(found_);  // whose first plan keeps everything
    return std::move(found_);
  }

 private:
  double copy_seconds(int64_t bytes) const {
    return static_cast<double>(bytes) * (1 / speed_.out + 1 / speed_.back);
  }

  // Plans with the contents moved, where they are dropped, whose copies take at most `most` times
  // as long as their calls; a copy is worth `price` of its time.
  void try_moving(double most, double price) {
    std::vector<int32_t> worth;
    std::vector<double> seconds = all(trace_, 0);
    for (size_t i = 0; i < trace_.contents.size(); ++i) {
      const auto& content = trace_.contents[i];
      if (!can_be_moved(content)) continue;
      const double copies = copy_seconds(content.bytes);
      seconds[i] = kSecondsPerMove + price * copies;
      if (copies <= most * recompute_seconds(content)) worth.push_back(static_cast<int32_t>(i));
    }
    // Where not all have room, those that would take longest to be recomputed.
    const auto by_worth = [&](int32_t a, int32_t b) { return value(a) > value(b); };
    std::stable_sort(worth.begin(), worth.end(), by_worth);
    std::vector<uint8_t> moved(trace_.contents.size());
    int64_t left = most_moved_;
    for (const int32_t content : worth) {
      if (trace_.contents[content].bytes > left) continue;
      left -= trace_.contents[content].bytes;
      moved[content] = 1;
    }
    if (left == most_moved_) return;
    const std::vector<Plan> plans = plans_of(with_calls_for(trace_, moved, seconds));
    for (const Plan& plan : plans) add(plan.decisions, moved);
    // All of it, and nothing recomputed: where the bus is idle, nothing costs less.
    std::vector<Decision> all_moved(moved.size(), Decision::kKeep);
    for (size_t i = 0; i < moved.size(); ++i) {
      if (moved[i]) all_moved[i] = Decision::kDrop;
    }
    add(std::move(all_moved), moved);
  }

  double recompute_seconds(const TraceContent& content) const {
    const bool is_possible = content.call >= 0 && !content.must_be_kept;
    return is_possible ? trace_.calls[content.call].seconds + kSecondsPerCall
                       : std::numeric_limits<double>::infinity();
  }

  double value(int32_t content) const {
    return recompute_seconds(trace_.contents[content]) /
           static_cast<double>(trace_.contents[content].bytes);
  }

  void add(std::vector<Decision> decisions, const std::vector<uint8_t>& could_move) {
    for (size_t i = 0; i < decisions.size(); ++i) {
      if (!could_move[i] || decisions[i] == Decision::kKeep) continue;
      const bool is_twice = decisions[i] == Decision::kDropTwice;
      decisions[i] = is_twice ? Decision::kMoveTwice : Decision::kMove;
    }
    // What could be moved and is kept is made by its own call here, as it will be.
    const AsDropped step(trace_, decisions);
    if (!step.moves()) return;
    Simulator simulator(step.trace());
    const auto result = simulator.run(step.decisions());
    const Schedule schedule =
        Scheduler(trace_, clock_, simulator, decisions, result.peak, speed_).schedule();
    found_.push_back({result.peak, result.seconds + schedule.waiting, std::move(decisions)});
  }

  const Trace& trace_;
  const store::Speed speed_;
  const int64_t most_moved_;
  const std::vector<double> clock_;
  std::vector<Plan> found_;
};

}  // namespace

AsDropped::AsDropped(const Trace& trace, const std::vector<Decision>& decisions)
    : trace_(trace), decisions_(decisions) {
  if (std::none_of(decisions.begin(), decisions.end(), is_moved)) return;
  std::vector<uint8_t> moved(trace.contents.size());
  std::transform(decisions.begin(), decisions.end(), moved.begin(), is_moved);
  made_ = with_calls_for(trace, moved, all(trace, kSecondsPerMove));
  for (const Decision decision : decisions) {
    dropped_.push_back(decision == Decision::kMove        ? Decision::kDrop
                       : decision == Decision::kMoveTwice ? Decision::kDropTwice
                                                          : decision);
  }
}

MovingPlans::MovingPlans(const Trace& trace, const std::vector<Plan>& recompute, store::Speed speed,
                         int64_t most_moved)
    : speed(speed),
      most_moved(most_moved),
      plans(MovePlanner(trace, speed, most_moved).plans(recompute)) {}

std::shared_ptr<const Schedule> MovingPlans::schedule(const Trace& trace, const Plan& plan) {
  const std::lock_guard<Lock> lock(mutex_);
  const auto [place, is_new] = schedules_.try_emplace(&plan);
  if (!is_new) return place->second;
  const AsDropped step(trace, plan.decisions);
  if (!step.moves()) return nullptr;
  Simulator simulator(step.trace());
  simulator.run(step.decisions());
  const std::vector<double> clock = clock_of(trace);
  place->second = std::make_shared<Schedule>(
      Scheduler(trace, clock, simulator, plan.decisions, plan.peak, speed).schedule());
  return place->second;
}

Plan simulate(const Trace& trace, std::vector<Decision> decisions) {
  const AsDropped step(trace, decisions);  // which refers to them where nothing is moved
  Simulator simulator(step.trace());
  for (size_t i = 0; !step.moves() && i < decisions.size(); ++i) {
    if (!simulator.can_be_dropped(static_cast<int32_t>(i))) decisions[i] = Decision::kKeep;
  }
  const auto result = simulator.run(step.decisions());
  return {result.peak, result.seconds, std::move(decisions)};
}

}  // namespace memsave_ext::plan
