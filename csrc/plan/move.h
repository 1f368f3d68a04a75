// When the copies of a step that moves contents begin, and for how long the step waits for them.
#pragma once

#include <cstdint>
#include <vector>

#include "plan/simulate.h"
#include "plan/trace.h"
#include "store/speed.h"

namespace memsave_ext::plan {

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

// The copies of a trace's steps, and its clock.
class Bus {
 public:
  Bus(const Trace& trace, store::Speed speed);

  // Of a step with these decisions, as the simulator has run it latest, whose peak may be `level`.
  Schedule schedule(const Simulator& simulator, const std::vector<Decision>& decisions,
                    int64_t level) const;
  struct Cost {
    int64_t peak;
    double waiting;
  };
  Cost cost(const Simulator& simulator, const std::vector<Decision>& decisions,
            int64_t level) const;

 private:
  const Trace& trace_;
  const store::Speed speed_;
  const std::vector<double> clock_;  // by moment
};

}  // namespace memsave_ext::plan
