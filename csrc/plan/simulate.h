// Simulates steps of one trace: what a set of decisions needs, moment by moment.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "plan/trace.h"

namespace memsave_ext::plan {

// Marks what must be kept whatever else is dropped: what shares its memory with something else that
// is saved, as where chunks of a tensor are written one by one (dropping one of these would free
// nothing), and what could only be computed from memory that was emptied or written before.
void mark_what_must_be_kept(Trace& trace);

// The time of a step in slots, in order. A slot is either a stretch of intervals in which no memory
// of the block begins or ends, or a moment at which contents are opened.
class Timeline {
 public:
  explicit Timeline(const Trace& trace);

  // When a content's memory is there, in slots; the last slot counts.
  struct Span {
    int32_t kept_from = -1;  // where it is kept; -1: it costs nothing
    int32_t opened = -1;     // its recompute begins; -1: nobody opens it
    int32_t until = -1;
  };

  int32_t size() const { return static_cast<int32_t>(memory.size()); }

  std::vector<int64_t> memory;  // by slot, without the block's
  // By moment: the slot of the interval before it, and its own, which is another where contents are
  // opened there.
  std::vector<int32_t> before, at;
  std::vector<Span> spans;        // by content
  std::vector<int32_t> openings;  // saved contents that are opened, in the order of their opening
};

class Simulator {
 public:
  explicit Simulator(const Trace& trace);

  struct Result {
    int64_t peak = 0;
    double seconds = 0;  // of operators that run again, and of the host for what is moved
    int most_runs = 0;   // how often an operator is run again, or a content brought back, at most
  };
  // `watched`: a slot, for held().
  Result run(const std::vector<Decision>& decisions, int32_t watched = -1);

  const Trace& trace() const { return trace_; }
  const Timeline& timeline() const { return timeline_; }
  // By slot, of the latest run.
  const std::vector<int64_t>& memory() const { return memory_; }
  // Contents whose memory only the block holds in the slot that was watched.
  struct Held {
    std::vector<int32_t> kept, recomputed;
  };
  const Held& held() const { return held_; }
  bool can_be_dropped(int32_t content) const;
  bool can_be_moved(int32_t content) const;
  // Keeps what it must.
  void correct(std::vector<Decision>& decisions) const;
  // By content, of the latest run: the slot in which it was brought back first; -1: it was not.
  const std::vector<int32_t>& first_back() const { return first_back_; }

 private:
  struct Frame {
    int32_t call;
    size_t next;  // the position in its reads that comes next
  };

  void begin(const std::vector<Decision>& decisions);
  void pin();
  void open(int32_t content);
  void count_uses(int32_t content);
  void make_available(int32_t content);
  void bring_back(int32_t content);
  void take(const TraceCall& call, int32_t content);
  void finish(int32_t call);
  void hold(int32_t content);
  void add_kept();
  bool is_there(int32_t content) const { return based_[content] || held_until_[content] >= slot_; }
  // Whether it comes from the store, and not from its call.
  bool is_away(int32_t content) const { return is_moved((*decisions_)[content]); }
  bool stays(int32_t content) const;
  void grow(int64_t bytes);

  const Trace& trace_;
  const Timeline timeline_;
  const std::vector<Decision>* decisions_ = nullptr;
  Result result_;
  int32_t slot_ = 0;
  int32_t opened_ = -1;  // the content that is made or brought back for its opening
  int64_t live_ = 0;     // bytes of recomputed contents
  int64_t top_ = 0;      // the most of them in this slot
  std::vector<int32_t> first_back_;
  std::vector<uint8_t> based_;       // by content: it is kept
  std::vector<int32_t> held_until_;  // by content: made again and held until this slot; -1: not
  std::vector<int32_t>
      needed_until_;  // by content: the last slot in which it is kept for a dropped one
  // By content, of the recomputation that runs.
  std::vector<int32_t> uses_;        // that are still to come
  std::vector<uint8_t> on_the_way_;  // it has memory, though it is not held
  std::vector<uint8_t> counted_;     // by call
  std::vector<int32_t> pending_;     // contents whose uses are to be counted
  std::vector<int32_t> runs_;        // by call
  std::vector<int32_t> backs_;       // by content
  std::vector<int32_t> counted_calls_;
  std::vector<Frame> stack_;
  std::vector<int64_t> freed_;  // bytes that are freed after a slot
  std::vector<int64_t> memory_;
  int32_t watched_ = -1;
  Held held_;
};

// Returns what a step with these decisions needs. What can be neither dropped nor moved is kept.
Plan simulate(const Trace& trace, std::vector<Decision> decisions);

}  // namespace memsave_ext::plan
