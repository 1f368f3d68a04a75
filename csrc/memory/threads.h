// What each thread is doing, as the hooks on modules, optimizer and checkpointed regions tell.
#pragma once

#include <cstdint>
#include <map>
#include <unordered_map>
#include <utility>
#include <vector>

#include "memory/moment.h"

namespace memsave_ext::memory {

// One checkpointed region, over all its recomputes.
struct Region {
  int64_t calls = 0;
  int64_t saved_bytes = 0;  // the most that one recompute left for backward
  int64_t nanoseconds = 0;
};

struct Where {
  Phase phase;
  int64_t span;
  int32_t module;
};

class Threads {
 public:
  // `parents[module]` is the module that holds it, -1 for the outermost.
  explicit Threads(std::vector<int32_t> parents) : parents_(std::move(parents)) {}

  Where where(const Moment& moment);

  void enter_module(const Moment& moment, int32_t module, uint64_t sequence);
  void exit_module(const Moment& moment, int32_t module, uint64_t sequence);
  void begin_recompute(const Moment& moment);
  void end_recompute(const Moment& moment);
  void begin_optimizer(const Moment& moment);
  void end_optimizer(const Moment& moment);
  bool inside_module(const Moment& moment) const;

  // Of blocks allocated in a recompute, while it runs.
  void count(int64_t span, int64_t bytes);

  // Nodes of graphs from before the previous step are not looked up any more.
  void end_step();
  // Nothing that is open stays so: tracking begins or ends.
  void clear();

  // By module; -1 where there is none.
  const std::map<int32_t, Region>& regions() const { return regions_; }

 private:
  struct Open {
    int32_t module;
    bool recompute;  // it is the recompute of a region that is not ours
  };
  struct Recompute {
    int64_t span;
    int64_t begin;
    size_t depth;  // of modules
    int64_t bytes;
    int32_t node_module;  // of the node that needs it: the region's last, or the region's own
    int32_t module;       // that holds all it has entered, -1 before
  };
  struct Mark {
    uint64_t sequence;  // of the first autograd node made from here on
    int32_t module;
  };
  struct Thread {
    std::vector<Open> modules;
    std::vector<Recompute> recomputes;
    std::vector<Mark> marks;
    size_t marks_before_step = 0;
    bool optimizer = false;
  };

  void mark(Thread& thread, uint64_t sequence);
  int32_t name_of(const Recompute& recompute) const;
  int32_t common_module(int32_t a, int32_t b) const;
  int32_t module_of_node(const Moment& moment) const;

  std::vector<int32_t> parents_;
  std::unordered_map<uint64_t, Thread> threads_;
  std::map<int32_t, Region> regions_;
  int64_t forward_ = 0;  // the number of the present forward
  int64_t recompute_ = 0;
  bool after_forward_ = false;  // a loss is computed: until backward begins
};

}  // namespace memsave_ext::memory
