// Plans a step, from what an earlier one did: which saved contents are kept, and which are dropped
// and recomputed.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <vector>

#include "locks.h"
#include "plan/constants.h"
#include "plan/move.h"
#include "plan/trace.h"
#include "store/speed.h"

namespace memsave_ext::plan {

// Returns plans from the fastest, which keeps everything, to the one with the lowest peak found:
// seconds rise, peaks fall. None runs an operator again more than twice, but for the last one where
// that lowers the peak further; it alone may take less time than the one before. The same trace
// gives the same plans. All are tried where they are at most 2^most_enumerated.
std::vector<Plan> plans_of(const Trace& trace, int most_enumerated = kMostEnumerated);

// Returns plans that also move contents to a store, at most so many bytes, where these or the given
// ones, which plans_of() has found, take less time.
std::vector<Plan> plans_of(const Trace& trace, const std::vector<Plan>& recompute,
                           store::Speed speed, int64_t most_moved);

// Sorts all plans after the first, the fastest first, and removes those that another one beats.
void keep_frontier(std::vector<Plan>& plans);

// Returns the one of a trace's plans with the lowest sum of time and memory, as shares of the plain
// step's. A percent of the time is worth four of the memory.
const Plan& best_value(const Trace& trace, const std::vector<Plan>& plans);

// Returns the fastest plan with at most so many bytes; where there is none, about the least.
const Plan& plan_within(const std::vector<Plan>& plans, int64_t bytes);

// Plans that move contents, and when their copies begin.
class MovingPlans {
 public:
  MovingPlans(const Trace& trace, const std::vector<Plan>& recompute, store::Speed speed,
              int64_t most_moved);

  const store::Speed speed;
  const int64_t most_moved;
  std::vector<Plan> plans;  // as plans_of() has them; never changed

  // Null where the plan moves nothing.
  std::shared_ptr<const Schedule> schedule(const Trace& trace, const Plan& plan);

 private:
  Lock mutex_{LockOrder::kSchedules};
  std::map<const Plan*, std::shared_ptr<const Schedule>> schedules_;
};

}  // namespace memsave_ext::plan
