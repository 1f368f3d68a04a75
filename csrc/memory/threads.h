// What each thread is doing, as reported by hooks of modules, optimizers and checkpointed regions.
#pragma once

#include <cstdint>
#include <map>
#include <unordered_map>
#include <utility>
#include <vector>

#include "memory/event_context.h"

namespace memsave_ext::memory {

// Figures of one checkpointed region over all its recomputes.
struct CheckpointedRegion {
  int64_t calls = 0;
  int64_t saved_bytes = 0;  // the most bytes that one recompute left for backward
  int64_t nanoseconds = 0;
};

struct Where {
  Phase phase;
  int64_t span;    // number of the forward or of the recompute; else 0
  int32_t module;  // -1 for none
};

class Threads {
 public:
  // `parents[module]` is the number of the module that contains it; -1 for the outermost.
  explicit Threads(std::vector<int32_t> parents) : parents_(std::move(parents)) {}

  Where where(const EventContext& context);

  // `sequence`: the number that autograd gives to the next node.
  void enter_module(const EventContext& context, int32_t module, uint64_t sequence);
  void exit_module(const EventContext& context, int32_t module, uint64_t sequence);
  void begin_recompute(const EventContext& context);
  void end_recompute(const EventContext& context);
  void begin_optimizer(const EventContext& context);
  void end_optimizer(const EventContext& context);
  bool inside_module(const EventContext& context) const;

  // Adds `bytes` (negative for a free) to what recompute `span` has allocated, while it runs.
  void count(int64_t span, int64_t bytes);

  // Forgets the modules of autograd nodes that were made before the previous step's end.
  void end_step();
  // Forgets all threads' modules, recomputes and optimizers, as tracking begins or ends.
  void clear();

  // By module number; -1 for regions without a module.
  const std::map<int32_t, CheckpointedRegion>& regions() const { return regions_; }

 private:
  struct Open {  // a module whose forward runs
    int32_t module;
    bool recompute;  // it began the recompute of another library's region
  };
  struct Recompute {
    int64_t span;
    int64_t begin;        // ns
    size_t depth;         // open modules when it began
    int64_t bytes;        // that it has allocated and not freed
    int32_t node_module;  // of the autograd node that needs it, see name_of(); -1 for none
    int32_t module;       // contains all modules it has entered; -1 before the first
  };
  struct Mark {         // autograd nodes from here on are made in this module
    uint64_t sequence;  // of the first of these nodes
    int32_t module;     // -1 outside of all
  };
  struct Thread {
    std::vector<Open> modules;  // innermost last
    std::vector<Recompute> recomputes;
    std::vector<Mark> marks;
    size_t marks_before_step = 0;  // marks from before the latest end_step()
    bool optimizer = false;
  };

  void mark(Thread& thread, uint64_t sequence);
  int32_t name_of(const Recompute& recompute) const;
  int32_t common_module(int32_t a, int32_t b) const;
  int32_t module_of_node(const EventContext& context) const;

  std::vector<int32_t> parents_;
  std::unordered_map<uint64_t, Thread> threads_;
  std::map<int32_t, CheckpointedRegion> regions_;
  int64_t forward_ = 0;  // the number of the present forward
  int64_t recompute_ = 0;
  bool after_forward_ = false;  // the model's forward ended: the loss is computed until backward
};

}  // namespace memsave_ext::memory
