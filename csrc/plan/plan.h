// Plans a step, from what an earlier one did: which saved contents are kept, and which are dropped
// and recomputed.
#pragma once

#include <vector>

#include "plan/trace.h"

namespace memsave_ext::plan {

// Returns plans from the fastest, which keeps everything, to the one with the lowest peak found:
// seconds rise, peaks fall. None runs an operator again more than twice, but for the last one where
// that lowers the peak further; it alone may take less time than the one before. The same trace
// gives the same plans. All decisions are tried where at most `most_enumerated` contents can be
// dropped.
std::vector<Plan> plans_of(const Trace& trace, int most_enumerated = 14);

// Sorts all plans after the first, the fastest first, and removes those that another one beats.
void keep_frontier(std::vector<Plan>& plans);

// Returns the one of a trace's plans with the lowest sum of time and memory, as shares of the plain
// step's. A percent of the time is worth four of the memory.
const Plan& best_value(const Trace& trace, const std::vector<Plan>& plans);

}  // namespace memsave_ext::plan
