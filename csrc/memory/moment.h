// When and where an allocation or a free happens, gathered before any lock is taken.
#pragma once

#include <cstdint>

#include "memory/stacks.h"

namespace memsave_ext::memory {

// The order of PHASES in memsave_ext/memory/account.py.
enum class Phase : int8_t { kOther, kForward, kBackward, kRecompute, kOptimizer };

struct Moment {
  int64_t time;     // ns of a steady clock
  uint64_t thread;  // as autograd numbers them
  bool in_backward;
  // The autograd node that runs, named as autograd does.
  bool has_node = false;
  uint64_t node_thread = 0;
  uint64_t node_sequence = 0;
  Stack stack;

  static Moment now();
};

}  // namespace memsave_ext::memory
