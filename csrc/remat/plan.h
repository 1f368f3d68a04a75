// Plans a step: which saved contents are kept, and which are dropped and recomputed.
#pragma once

#include <cstdint>
#include <vector>

#include "remat/trace.h"

namespace memsave_ext::remat {

enum class Decision : uint8_t {
  kKeep,
  kDrop,       // recomputed when it is needed first, and held until it is needed no more
  kDropTwice,  // as kDrop, but where it lies on the way to another content it is not held: it is
               // recomputed once more when it is needed itself
};

struct Plan {
  int64_t peak = 0;                 // bytes
  double seconds = 0;               // that recomputing takes
  std::vector<Decision> decisions;  // by content; kKeep for those that are not saved
};

// Returns what a step with these decisions needs.
Plan simulate(const Trace& trace, std::vector<Decision> decisions);

// Returns plans from the fastest, which keeps everything, to the one with the lowest peak found:
// seconds rise, peaks fall. None runs an operator again more than twice, but for the last one where
// that lowers the peak further; it alone may take less time than the one before. The same trace
// gives the same plans. All decisions are tried where at most `most_enumerated` contents can be
// dropped.
std::vector<Plan> plans_of(const Trace& trace, int most_enumerated = 14);

// Where a step under a plan needs the most memory.
struct Limit {
  bool in_forward = false;
  int32_t call = -1;   // forward: made the latest content; backward: made the one opened last
  int64_t others = 0;  // bytes that no plan changes: what lived before, gradients, what runs
  int64_t held = 0;    // bytes of contents that are kept or were recomputed
};
Limit limit_of(const Trace& trace, const Plan& plan);

// Returns the one of a trace's plans with the lowest sum of time and memory, as shares of the plain
// step's. A percent of the time is worth four of the memory.
const Plan& best_value(const Trace& trace, const std::vector<Plan>& plans);

}  // namespace memsave_ext::remat
