#include "remat/plan.h"

#include <algorithm>

namespace memsave_ext::remat {

// Keeps everything. TODO: drop.
std::vector<Plan> plans_of(const Trace& trace) {
  Plan plan;
  for (const auto& moment : trace.moments) plan.peak = std::max(plan.peak, moment.peak);
  plan.decisions.assign(trace.contents.size(), Decision::kKeep);
  return {plan};
}

}  // namespace memsave_ext::remat
