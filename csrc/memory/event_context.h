// When and where memory is allocated or freed; gathered before any lock is taken.
#pragma once

#include <cstdint>

#include "memory/stacks.h"

namespace memsave_ext::memory {

// Indices into PHASES of memsave_ext/memory/account.py.
enum class Phase : int8_t { kOther, kForward, kBackward, kRecompute, kOptimizer, kRematerialize };

inline bool is_recompute(Phase phase) {
  return phase == Phase::kRecompute || phase == Phase::kRematerialize;
}

struct EventContext {
  int64_t time;     // ns of a steady clock
  uint64_t thread;  // autograd's number of it
  bool in_backward;
  // The autograd node that runs, identified by its thread and its sequence number.
  bool has_node = false;
  uint64_t node_thread = 0;
  uint64_t node_sequence = 0;
  std::shared_ptr<const Origin> origin;  // null unless the caller of now() sets it

  static EventContext now();
};

}  // namespace memsave_ext::memory
