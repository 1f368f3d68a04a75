#include "plan/plan.h"

#include <algorithm>
#include <limits>

#include "plan/search.h"
#include "plan/simulate.h"

namespace memsave_ext::plan {
namespace {

// Returns decisions that drop what is made and read in the same of about `segments` segments of the
// forward, and so keep what crosses between them.
std::vector<Decision> drop_within_segments(const Trace& trace, const Routes& routes, int segments) {
  const auto repeats = static_cast<int32_t>(routes.repeats.size());
  // By repeat: the bytes made so far, and those of them that later repeats read.
  std::vector<int64_t> made(repeats + 1), crossing(repeats + 1);
  std::vector<int32_t> last(trace.contents.size(), -1);
  for (const int32_t content : routes.droppable) {
    for (const int32_t user : routes.users[content]) last[content] = std::max(last[content], user);
    const int32_t from = routes.repeat_of[content];
    const int64_t bytes = trace.contents[content].bytes;
    made[from] += bytes;
    crossing[from] += bytes;
    crossing[std::max(last[content], from)] -= bytes;
  }
  for (int32_t i = 1; i <= repeats; ++i) {
    made[i] += made[i - 1];
    crossing[i] += crossing[i - 1];
  }
  // A segment ends where few bytes cross, within half a segment of its share of the bytes.
  std::vector<int32_t> segment_of(repeats);
  int32_t cut = -1;
  for (int i = 1; i < segments; ++i) {
    const auto share = [&](double position) {
      const double bytes = static_cast<double>(made[repeats]) * position / segments;
      return static_cast<int32_t>(
          std::lower_bound(made.begin(), made.end(), static_cast<int64_t>(bytes)) - made.begin());
    };
    const int32_t from = std::max(cut + 1, share(i - 0.5));
    const int32_t to = std::min(share(i + 0.5), repeats - 1);
    if (from >= to) continue;
    cut = static_cast<int32_t>(std::min_element(crossing.begin() + from, crossing.begin() + to) -
                               crossing.begin());
    for (int32_t repeat = cut + 1; repeat < repeats; ++repeat) ++segment_of[repeat];
  }
  std::vector<Decision> decisions(trace.contents.size(), Decision::kKeep);
  for (const int32_t content : routes.droppable) {
    const int32_t segment = segment_of[routes.repeat_of[content]];
    const bool crosses = last[content] >= 0 && segment_of[last[content]] > segment;
    if (!crosses) decisions[content] = Decision::kDrop;
  }
  return decisions;
}

// The best plans found so far.
class Frontier {
 public:
  void add(const Simulator::Result& result, const std::vector<Decision>& decisions) {
    if (result.peak < least_.peak) least_ = {result.peak, result.seconds, decisions};
    if (result.most_runs > kMostRuns) return;
    const auto is_better = [&](const Plan& plan) {
      return plan.peak <= result.peak && plan.seconds <= result.seconds;
    };
    if (std::any_of(plans_.begin(), plans_.end(), is_better)) return;
    plans_.push_back({result.peak, result.seconds, decisions});
  }

  const std::vector<Plan>& sorted() {
    keep_frontier(plans_);
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
    plain_ = set(all_kept()).peak;
    const auto& memory = simulator_.timeline().memory;
    floor_ = memory.empty() ? 0 : *std::max_element(memory.begin(), memory.end());
    const auto droppable = static_cast<int>(routes_.droppable.size());
    if (droppable == 0) return frontier_.take();
    if (droppable <= most_enumerated) enumerate();
    const int levels = std::clamp(kWork / droppable, kFewestLevels, kMostLevels);
    stop_at(0.2);
    descend(all_kept(), levels, 0.03);
    const bool is_large = search_.is_stopped();
    stop_at(0.3);
    descend(all_kept(), levels, 0.15);
    stop_at(0.6);
    start_from_segments(levels);
    stop_at(0.85);
    if (is_large) go_lower();
    stop_at(1);
    ascend(frontier_.sorted().back().decisions, plain_, std::max(levels, kLevels));
    improve(droppable);
    return frontier_.take();
  }

 private:
  // What comes next ends when so much of the work that a trace is worth has been done.
  void stop_at(double share) {
    const auto operators = static_cast<int64_t>(trace_.calls.size());
    const auto most = std::clamp(kWorkPerOperator * operators, kLeastWork, kMostWork);
    search_.stop_at(static_cast<int64_t>(share * static_cast<double>(most)));
  }

  std::vector<Decision> all_kept() const {
    return std::vector<Decision>(trace_.contents.size(), Decision::kKeep);
  }

  Simulator::Result set(std::vector<Decision> decisions) {
    const auto result = search_.set(std::move(decisions));
    frontier_.add(result, search_.decisions());
    return result;
  }

  int64_t step(int levels) const { return std::max<int64_t>((plain_ - floor_) / levels, 1); }

  bool reach(int64_t level, int64_t aim) {
    for (int i = 0; i < 4; ++i) {
      const bool lowered = search_.lower(level, aim);
      search_.put_back(level);
      const auto result = set(search_.decisions());
      if (result.peak <= level) return true;
      if (!lowered) return false;
    }
    return false;
  }

  // Lowers the peak level by level. `ahead` is how far below a level it looks for the best drops,
  // as a share of all that there is to lower.
  void descend(std::vector<Decision> decisions, int levels, double ahead) {
    int64_t above = set(std::move(decisions)).peak;
    const auto below = static_cast<int64_t>(static_cast<double>(plain_ - floor_) * ahead);
    for (int64_t level = above - step(levels); level >= floor_; level -= step(levels)) {
      if (!reach(level, std::max(level - below, floor_))) break;
      if (levels < kLevels) {
        // Also what is between two levels.
        const auto reached = search_.decisions();
        ascend(reached, above, kLevels);
        set(reached);
      }
      above = level;
    }
  }

  // Keeps more, level by level.
  void ascend(std::vector<Decision> decisions, int64_t below, int levels) {
    const int64_t peak = set(std::move(decisions)).peak;
    for (int64_t level = peak; level < below && !search_.is_stopped(); level += step(levels)) {
      search_.put_back(level);
      set(search_.decisions());
    }
  }

  // Lowers the lowest peak, by an eighth of what is left each time.
  void go_lower() {
    constexpr int64_t kParts = 8;
    int64_t level = 0;
    do {
      const Plan lowest = frontier_.sorted().back();
      level = lowest.peak - std::max<int64_t>((lowest.peak - floor_) / kParts, 1);
      set(lowest.decisions);
    } while (level >= floor_ && reach(level, floor_));
  }

  // Begins with what crosses between segments of the forward, which is needed where memory is
  // least.
  void start_from_segments(int levels) {
    std::vector<Plan> starts;
    for (int segments = 1; segments <= kMostSegments; segments += 1 + segments / 4) {
      auto decisions = drop_within_segments(trace_, routes_, segments);
      const auto result = set(decisions);
      starts.push_back({result.peak, result.seconds, std::move(decisions)});
    }
    std::stable_sort(starts.begin(), starts.end(),
                     [](const Plan& a, const Plan& b) { return a.peak < b.peak; });
    starts.resize(kStarts);
    for (const auto& start : starts) {
      ascend(start.decisions, plain_, levels);
      descend(start.decisions, levels, 0);
    }
  }

  // Changes one decision of a plan, and then what follows from it, for all plans in turn. It pays
  // for small traces, where what is left over at a level is a large share.
  void improve(int droppable) {
    auto tries = std::min<int64_t>(kTries / droppable / droppable, 600);
    for (size_t next = 0; tries > 0 && !search_.is_stopped(); ++next) {
      const std::vector<Plan> plans = frontier_.sorted();
      if (plans.size() < 2) break;
      for (size_t i = 1; i < plans.size() && tries > 0 && !search_.is_stopped(); ++i, --tries) {
        const int32_t content = routes_.droppable[(next + i * 7) % routes_.droppable.size()];
        const int64_t level = plans[i - 1].peak - 1;
        search_.set(plans[i].decisions);
        const bool is_kept = plans[i].decisions[content] == Decision::kKeep;
        search_.force(content, is_kept ? Decision::kDrop : Decision::kKeep);
        search_.lower(level, level);
        search_.put_back(level);
        set(search_.decisions());
      }
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
  int64_t plain_ = 0;  // the peak where everything is kept
  int64_t floor_ = 0;  // no peak is lower
  Simulator simulator_;
  const Routes routes_;
  Search search_;
  Frontier frontier_;
};

}  // namespace

std::vector<Plan> plans_of(const Trace& trace, int most_enumerated) {
  return Planner(trace).plans(most_enumerated);
}

void keep_frontier(std::vector<Plan>& plans) {
  std::stable_sort(plans.begin() + 1, plans.end(), [](const Plan& a, const Plan& b) {
    return a.seconds != b.seconds ? a.seconds < b.seconds : a.peak < b.peak;
  });
  size_t kept = 1;
  for (size_t i = 1; i < plans.size(); ++i) {
    if (plans[i].peak < plans[kept - 1].peak) std::swap(plans[kept++], plans[i]);
  }
  plans.resize(kept);
}

const Plan& best_value(const Trace& trace, const std::vector<Plan>& plans) {
  constexpr double kPrice = 0.25;
  double forward = 0;
  for (const TraceCall& call : trace.calls) forward += call.seconds;
  const double seconds = std::max(3 * forward, 1e-6);  // a backward is about two forwards
  const auto bytes = static_cast<double>(std::max<int64_t>(plans.front().peak, 1));
  const auto cost = [&](const Plan& plan) {
    return plan.seconds / seconds + kPrice * static_cast<double>(plan.peak) / bytes;
  };
  return *std::min_element(plans.begin(), plans.end(),
                           [&](const Plan& a, const Plan& b) { return cost(a) < cost(b); });
}

}  // namespace memsave_ext::plan
