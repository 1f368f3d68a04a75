// Plans that also move contents to a store: what was moved comes back as if it were recomputed by
// an operator that reads nothing, and the time that this takes is that of a bus.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "locks.h"
#include "remat/plan.h"
#include "store/store.h"

namespace memsave_ext::remat {

// A step in which contents are moved, as one in which they are dropped.
class AsDropped {
 public:
  AsDropped(const Trace& trace, const std::vector<Decision>& decisions);

  bool moves() const { return made_.has_value(); }
  const Trace& trace() const { return moves() ? *made_ : trace_; }
  const std::vector<Decision>& decisions() const { return moves() ? dropped_ : decisions_; }

 private:
  const Trace& trace_;
  const std::vector<Decision>& decisions_;
  std::optional<Trace> made_;
  std::vector<Decision> dropped_;
};

// When a plan's copies begin, so that its peak is kept to.
struct Schedule {
  // By content: those that begin to come back when it is opened first. Others are brought back when
  // they are opened themselves.
  std::vector<std::vector<int32_t>> back;
  // The most bytes of contents that count and are still being copied: by moment of the forward,
  // before it; and by content, from its first opening to the next one.
  std::vector<int64_t> room_before, room_after;
  double waiting = 0;  // seconds, for copies that are not over in time
};

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

}  // namespace memsave_ext::remat
