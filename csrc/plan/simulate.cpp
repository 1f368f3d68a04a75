#include "plan/simulate.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "plan/constants.h"

namespace memsave_ext::plan {
namespace {

// The contents whose memory the block may have to hold.
bool counts(const TraceContent& content) {
  return content.let_go >= 0 && (content.saved || content.call < 0);
}

}  // namespace

Timeline::Timeline(const Trace& trace) {
  const auto moments = static_cast<int32_t>(trace.moments.size());
  std::vector<uint8_t> is_bound(moments), is_opening(moments);
  for (const auto& content : trace.contents) {
    if (!counts(content)) continue;
    is_bound[content.let_go] = 1;
    if (content.opened >= 0) is_opening[content.opened] = 1;
    if (content.closed >= 0) is_bound[content.closed] = 1;
  }
  before.resize(moments);
  at.resize(moments);
  bool is_new = true;
  for (int32_t i = 0; i < moments; ++i) {
    if (is_new) memory.push_back(trace.moments[i].peak);
    memory.back() = std::max(memory.back(), trace.moments[i].peak);
    before[i] = at[i] = size() - 1;
    is_new = is_bound[i] || is_opening[i];
    if (!is_opening[i]) continue;
    memory.push_back(trace.moments[i].now);
    at[i] = size() - 1;
  }
  spans.resize(trace.contents.size());
  for (size_t i = 0; i < spans.size(); ++i) {
    const auto& content = trace.contents[i];
    if (!counts(content)) continue;
    spans[i].kept_from = at[content.let_go] + 1;
    if (content.opened >= 0) spans[i].opened = at[content.opened];
    // Pinned ones are held until they are read last.
    if (content.saved) spans[i].until = content.closed >= 0 ? at[content.closed] : size() - 1;
    if (content.saved && content.opened >= 0) openings.push_back(static_cast<int32_t>(i));
  }
  std::stable_sort(openings.begin(), openings.end(),
                   [&](int32_t a, int32_t b) { return spans[a].opened < spans[b].opened; });
}

Simulator::Simulator(const Trace& trace) : trace_(trace), timeline_(trace) {
  const size_t contents = trace.contents.size();
  based_.resize(contents);
  held_until_.resize(contents);
  first_back_.resize(contents);
  backs_.resize(contents);
  needed_until_.resize(contents);
  uses_.resize(contents);
  on_the_way_.resize(contents);
  counted_.resize(trace.calls.size());
  runs_.resize(trace.calls.size());
  freed_.resize(timeline_.size());
  memory_.resize(timeline_.size());
}

bool Simulator::can_be_dropped(int32_t content) const {
  const auto& c = trace_.contents[content];
  return c.saved && c.call >= 0 && c.let_go >= 0 && !c.must_be_kept;
}

bool Simulator::can_be_moved(int32_t content) const {
  const auto& c = trace_.contents[content];
  return c.saved && c.let_go >= 0 && c.bytes >= kLeastMoved;
}

void Simulator::correct(std::vector<Decision>& decisions) const {
  for (size_t i = 0; i < decisions.size(); ++i) {
    const auto content = static_cast<int32_t>(i);
    const bool is_possible =
        is_moved(decisions[i]) ? can_be_moved(content) : can_be_dropped(content);
    if (!is_possible) decisions[i] = Decision::kKeep;
  }
}

Simulator::Result Simulator::run(const std::vector<Decision>& decisions, int32_t watched) {
  watched_ = watched;
  held_ = {};
  begin(decisions);
  const auto& openings = timeline_.openings;
  size_t next = 0;
  for (slot_ = 0; slot_ < timeline_.size(); ++slot_) {
    top_ = live_;
    for (; next < openings.size() && timeline_.spans[openings[next]].opened == slot_; ++next) {
      open(openings[next]);
    }
    memory_[slot_] = timeline_.memory[slot_] + top_;
    if (slot_ == watched_) {
      for (size_t i = 0; i < based_.size(); ++i) {
        if (!based_[i] && held_until_[i] >= slot_) {
          held_.recomputed.push_back(static_cast<int32_t>(i));
        }
      }
    }
    live_ -= freed_[slot_];
  }
  add_kept();
  for (const int32_t runs : runs_) result_.most_runs = std::max(result_.most_runs, runs);
  return result_;
}

void Simulator::begin(const std::vector<Decision>& decisions) {
  decisions_ = &decisions;
  result_ = {};
  live_ = top_ = 0;
  for (size_t i = 0; i < based_.size(); ++i) {
    const auto& content = trace_.contents[i];
    based_[i] = content.let_go < 0 || (content.call < 0 && !is_moved(decisions[i])) ||
                (content.saved && decisions[i] == Decision::kKeep);
  }
  std::fill(held_until_.begin(), held_until_.end(), -1);
  std::fill(first_back_.begin(), first_back_.end(), -1);
  std::fill(backs_.begin(), backs_.end(), 0);
  std::fill(needed_until_.begin(), needed_until_.end(), -1);
  std::fill(runs_.begin(), runs_.end(), 0);
  std::fill(freed_.begin(), freed_.end(), 0);
  pin();
}

// What a dropped content is computed from is kept until no node needs the dropped one any more:
// the block cannot know whether a graph is retained. Contents come after those they are made of.
void Simulator::pin() {
  for (size_t i = based_.size(); i-- > 0;) {
    if (based_[i] || is_away(static_cast<int32_t>(i))) continue;
    int32_t until = needed_until_[i];
    if (trace_.contents[i].saved) until = std::max(until, timeline_.spans[i].until);
    for (const int32_t read : trace_.calls[trace_.contents[i].call].reads) {
      needed_until_[read] = std::max(needed_until_[read], until);
    }
  }
}

void Simulator::open(int32_t content) {
  if (is_there(content)) return;
  opened_ = content;
  count_uses(content);
  make_available(content);
  uses_[content] = 0;  // what opens it is no call
  for (const int32_t call : counted_calls_) counted_[call] = 0;
  counted_calls_.clear();
}

// Counts how often each content that is to be recomputed will be used.
void Simulator::count_uses(int32_t content) {
  pending_.push_back(content);
  while (!pending_.empty()) {
    const int32_t c = pending_.back();
    pending_.pop_back();
    if (is_there(c)) continue;
    // What a recomputation before this one left is zero, since all uses were counted down.
    ++uses_[c];
    if (is_away(c)) continue;
    const int32_t call = trace_.contents[c].call;
    if (counted_[call]) continue;
    counted_[call] = 1;
    counted_calls_.push_back(call);
    const auto& reads = trace_.calls[call].reads;
    pending_.insert(pending_.end(), reads.begin(), reads.end());
  }
}

void Simulator::make_available(int32_t content) {
  if (is_away(content)) return bring_back(content);
  stack_.push_back({trace_.contents[content].call, 0});
  while (!stack_.empty()) {
    Frame& frame = stack_.back();
    const auto& call = trace_.calls[frame.call];
    if (frame.next == call.reads.size()) {
      finish(frame.call);
      stack_.pop_back();
      continue;
    }
    const int32_t read = call.reads[frame.next];
    if (is_there(read) || on_the_way_[read]) {
      ++frame.next;
      take(call, read);
    } else if (is_away(read)) {
      bring_back(read);
    } else {
      stack_.push_back({trace_.contents[read].call, 0});
    }
  }
}

// Gives a content to a call that reads it.
void Simulator::take(const TraceCall& call, int32_t content) {
  const bool is_held = is_there(content);
  if (uses_[content] > 0) --uses_[content];
  const auto written = std::find(call.writes.begin(), call.writes.end(), content);
  if (written == call.writes.end()) return;
  const int32_t made = call.makes[written - call.writes.begin()];
  if (!is_held && uses_[content] == 0) {
    // Its memory becomes that of the made one.
    on_the_way_[content] = 0;
    live_ -= trace_.contents[content].bytes;
  }
  grow(trace_.contents[made].bytes);
}

void Simulator::finish(int32_t number) {
  const auto& call = trace_.calls[number];
  ++runs_[number];
  result_.seconds += call.seconds + kSecondsPerCall;
  int64_t bytes = 0;
  for (size_t i = call.writes.size(); i < call.makes.size(); ++i) {
    bytes += trace_.contents[call.makes[i]].bytes;
  }
  grow(bytes);
  top_ = std::max(top_, live_ + call.temporary);
  for (const int32_t made : call.makes) {
    const int64_t size = trace_.contents[made].bytes;
    if (is_there(made) || is_away(made)) {
      live_ -= size;
    } else {
      hold(made);
    }
  }
  for (const int32_t read : call.reads) {
    if (!on_the_way_[read] || uses_[read] > 0) continue;
    on_the_way_[read] = 0;
    live_ -= trace_.contents[read].bytes;
  }
}

void Simulator::bring_back(int32_t content) {
  result_.most_runs = std::max(result_.most_runs, ++backs_[content]);
  result_.seconds += kSecondsPerMove + kSecondsPerCall;
  if (first_back_[content] < 0) first_back_[content] = slot_;
  grow(trace_.contents[content].bytes);
  hold(content);
}

// What has memory now has it for as long as it is awaited.
void Simulator::hold(int32_t content) {
  const int64_t size = trace_.contents[content].bytes;
  if (stays(content)) {
    held_until_[content] = timeline_.spans[content].until;
    freed_[held_until_[content]] += size;
  } else if (uses_[content] > 0) {
    on_the_way_[content] = 1;
  } else {
    live_ -= size;
  }
}

// Whether a content that was just made is held until nobody needs it any more.
bool Simulator::stays(int32_t content) const {
  if (content == opened_) return true;
  const Decision decision = (*decisions_)[content];
  const bool is_once = decision == Decision::kDrop || decision == Decision::kMove;
  if (!trace_.contents[content].saved || !is_once) return false;
  const auto& span = timeline_.spans[content];
  return span.until >= slot_ && (trace_.contents[content].closed >= 0 || span.opened >= slot_);
}

void Simulator::grow(int64_t bytes) {
  live_ += bytes;
  top_ = std::max(top_, live_);
}

// Adds to the memory what is kept, and finds the peak.
void Simulator::add_kept() {
  std::fill(freed_.begin(), freed_.end(), 0);
  std::vector<int64_t>& change = freed_;
  for (size_t i = 0; i < based_.size(); ++i) {
    const auto& span = timeline_.spans[i];
    if (!based_[i] || span.kept_from < 0) continue;
    const int32_t until = std::max(span.until, needed_until_[i]);
    if (until < span.kept_from) continue;
    if (span.kept_from <= watched_ && watched_ <= until) {
      held_.kept.push_back(static_cast<int32_t>(i));
    }
    change[span.kept_from] += trace_.contents[i].bytes;
    if (until + 1 < timeline_.size()) change[until + 1] -= trace_.contents[i].bytes;
  }
  int64_t kept = 0;
  for (int32_t slot = 0; slot < timeline_.size(); ++slot) {
    kept += change[slot];
    memory_[slot] += kept;
    result_.peak = std::max(result_.peak, memory_[slot]);
  }
}

Plan simulate(const Trace& trace, std::vector<Decision> decisions) {
  Simulator simulator(trace);
  simulator.correct(decisions);
  const auto result = simulator.run(decisions);
  return {result.peak, result.seconds, std::move(decisions)};
}

namespace {

constexpr int32_t kNever = std::numeric_limits<int32_t>::max();

void keep_what_shares_memory(Trace& trace) {
  // By content: the one that was saved last among those that its memory held before; -1: none.
  std::vector<int32_t> saved_before(trace.contents.size(), -1);
  for (const TraceCall& call : trace.calls) {
    for (size_t i = 0; i < call.writes.size(); ++i) {
      const int32_t before = call.writes[i];
      const int32_t made = call.makes[i];
      const int32_t saved = trace.contents[before].saved ? before : saved_before[before];
      saved_before[made] = saved;
      if (saved < 0 || !trace.contents[made].saved) continue;
      trace.contents[saved].must_be_kept = trace.contents[made].must_be_kept = true;
    }
  }
}

void keep_what_cannot_run_again(Trace& trace) {
  // By content: the moment from which its memory holds something else or nothing, and that from
  // which what leads to it cannot run again.
  std::vector<int32_t> there_until(trace.contents.size(), kNever), until = there_until;
  for (const TraceCall& call : trace.calls) {
    for (const int32_t written : call.writes) there_until[written] = call.moment;
  }
  for (size_t i = 0; i < trace.contents.size(); ++i) {
    TraceContent& content = trace.contents[i];
    if (content.call < 0) {
      if (content.emptied >= 0) until[i] = content.emptied;
      continue;
    }
    const TraceCall& call = trace.calls[content.call];
    for (const int32_t read : call.reads) {
      const TraceContent& source = trace.contents[read];
      const bool is_kept = source.must_be_kept && source.decided <= call.moment;
      until[i] = std::min(until[i], is_kept ? there_until[read] : until[read]);
    }
    content.must_be_kept |= content.saved && until[i] <= content.decided;
  }
}

}  // namespace

void mark_what_must_be_kept(Trace& trace) {
  keep_what_shares_memory(trace);
  keep_what_cannot_run_again(trace);
}

}  // namespace memsave_ext::plan
