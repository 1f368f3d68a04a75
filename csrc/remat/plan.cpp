#include "remat/plan.h"

#include <algorithm>
#include <limits>

#include "remat/routes.h"
#include "remat/search.h"
#include "remat/segments.h"
#include "remat/simulate.h"

namespace memsave_ext::remat {
namespace {

// An operator runs again at most so often, except under the last plan.
constexpr int kMostRunsOfAny = 2;
constexpr int kLevels = 64;

// The best plans found so far.
class Frontier {
 public:
  void add(const Simulator::Result& result, const std::vector<Decision>& decisions) {
    if (result.peak < least_.peak) least_ = {result.peak, result.seconds, decisions};
    if (result.most_runs > kMostRunsOfAny) return;
    const auto is_better = [&](const Plan& plan) {
      return plan.peak <= result.peak && plan.seconds <= result.seconds;
    };
    if (std::any_of(plans_.begin(), plans_.end(), is_better)) return;
    plans_.push_back({result.peak, result.seconds, decisions});
  }

  // Sorts all after the first, and removes what another one beats.
  const std::vector<Plan>& sorted() {
    std::sort(plans_.begin() + 1, plans_.end(), [](const Plan& a, const Plan& b) {
      return a.seconds != b.seconds ? a.seconds < b.seconds : a.peak < b.peak;
    });
    size_t kept = 1;
    for (size_t i = 1; i < plans_.size(); ++i) {
      if (plans_[i].peak < plans_[kept - 1].peak) std::swap(plans_[kept++], plans_[i]);
    }
    plans_.resize(kept);
    return plans_;
  }

  // The last one may run operators more often.
  std::vector<Plan> take() {
    if (least_.peak < sorted().back().peak) plans_.push_back(std::move(least_));
    return std::move(plans_);
  }

 private:
  std::vector<Plan> plans_;
  Plan least_{std::numeric_limits<int64_t>::max(), 0, {}};
};

class Planner {
 public:
  explicit Planner(const Trace& trace)
      : trace_(trace), simulator_(trace), routes_(simulator_), search_(simulator_, routes_) {}

  std::vector<Plan> plans(int most_enumerated) {
    const int64_t plain = set(all_kept()).peak;
    int64_t floor = 0;
    for (const int64_t memory : simulator_.timeline().memory) floor = std::max(floor, memory);
    const int64_t step = std::max<int64_t>((plain - floor) / kLevels, 1);
    if (static_cast<int>(routes_.droppable.size()) <= most_enumerated) enumerate();
    descend(plain, floor, step);
    for (int segments = 1; segments <= 64; segments += 1 + segments / 4) {
      ascend(drop_within_segments(trace_, routes_, segments), plain, floor, step);
    }
    const auto least = frontier_.sorted().back();
    ascend(least.decisions, plain, floor, step);
    return frontier_.take();
  }

 private:
  std::vector<Decision> all_kept() const {
    return std::vector<Decision>(trace_.contents.size(), Decision::kKeep);
  }

  Simulator::Result set(std::vector<Decision> decisions) {
    const auto result = search_.set(std::move(decisions));
    frontier_.add(result, search_.decisions());
    return result;
  }

  bool reach(int64_t level) {
    for (int i = 0; i < 4; ++i) {
      const bool lowered = search_.lower(level);
      search_.put_back(level);
      const auto result = set(search_.decisions());
      if (result.peak <= level) return true;
      if (!lowered) return false;
    }
    return false;
  }

  void descend(int64_t peak, int64_t floor, int64_t step) {
    for (int64_t level = peak - step; level >= floor; level -= step) {
      if (!reach(level)) break;
    }
  }

  void ascend(std::vector<Decision> decisions, int64_t plain, int64_t floor, int64_t step) {
    int64_t peak = set(std::move(decisions)).peak;
    for (int64_t level = floor + (peak - floor + step - 1) / step * step; level < plain;
         level += step) {
      search_.put_back(level);
      set(search_.decisions());
    }
  }

  // Tries everything.
  void enumerate() {
    std::vector<Decision> decisions = all_kept();
    const size_t bits = routes_.droppable.size();
    for (uint32_t set = 1; set < (1u << bits); ++set) {
      for (size_t i = 0; i < bits; ++i) {
        decisions[routes_.droppable[i]] = set >> i & 1 ? Decision::kDrop : Decision::kKeep;
      }
      frontier_.add(simulator_.run(decisions), decisions);
    }
  }

  const Trace& trace_;
  Simulator simulator_;
  const Routes routes_;
  Search search_;
  Frontier frontier_;
};

}  // namespace

std::vector<Plan> plans_of(const Trace& trace, int most_enumerated) {
  return Planner(trace).plans(most_enumerated);
}

}  // namespace memsave_ext::remat
