#include "plan/plan.h"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <limits>
#include <mutex>

#include "plan/constants.h"
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
  for (const int32_t content : routes.free) {
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
  for (const int32_t content : routes.free) {
    const int32_t segment = segment_of[routes.repeat_of[content]];
    const bool crosses = last[content] >= 0 && segment_of[last[content]] > segment;
    if (!crosses && routes.can_be_dropped[content]) decisions[content] = Decision::kDrop;
  }
  return decisions;
}

// The best plans found so far.
class Frontier {
 public:
  // `cost` returns the peak with copies, and the seconds for which a step waits for them.
  template <class Cost>
  void add(const Simulator::Result& result, const std::vector<Decision>& decisions,
           const Cost& cost) {
    Plan plan{result.peak, result.seconds, {}};
    const auto is_better = [&](const Plan& other) {
      return other.peak <= plan.peak && other.seconds <= plan.seconds;
    };
    const auto is_beaten = [&] {
      return result.most_runs > kMostRuns || std::any_of(plans_.begin(), plans_.end(), is_better);
    };
    const bool is_least = plan.peak < least_.peak;
    if (!is_least && is_beaten()) return;
    const Bus::Cost copies = cost();
    plan.peak = copies.peak;
    plan.seconds += copies.waiting;
    plan.decisions = decisions;
    if (is_least) least_ = plan;
    if (!is_beaten()) plans_.push_back(std::move(plan));
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
  explicit Planner(const Trace& trace) : Planner(trace, {}, 0) {}
  Planner(const Trace& trace, store::Speed speed, int64_t most_moved)
      : trace_(trace),
        speed_(speed),
        most_moved_(most_moved),
        simulator_(trace),
        bus_(trace, speed),
        routes_(simulator_, moves()),
        search_(simulator_, routes_, most_moved) {}

  std::vector<Plan> plans(int most_enumerated) {
    begin();
    if (routes_.free.empty()) return frontier_.take();
    enumerate(most_enumerated);
    search(0, 1);
    improve();
    return frontier_.take();
  }

  std::vector<Plan> plans_from(const std::vector<Plan>& recompute, int most_enumerated) {
    begin();
    for (const Plan& plan : recompute) add(simulator_.run(plan.decisions), plan.decisions);
    if (!moves() || routes_.free.empty()) return frontier_.take();
    enumerate(most_enumerated);
    constexpr int kPrices = static_cast<int>(std::size(kPricesOfBus));
    for (int i = 0; i < kPrices; ++i) {
      search_.set_price(kPricesOfBus[i] * (1 / speed_.out + 1 / speed_.back));
      search(i, kPrices);
    }
    improve();
    return frontier_.take();
  }

 private:
  bool moves() const { return speed_.out > 0 && speed_.back > 0; }

  void begin() {
    plain_ = set(all_kept()).peak;
    const auto& memory = simulator_.timeline().memory;
    floor_ = memory.empty() ? 0 : *std::max_element(memory.begin(), memory.end());
  }

  // Searches with one price of the bus: the number of it, from 0 on, and how many there are.
  void search(int number, int of) {
    const auto free = static_cast<int>(routes_.free.size());
    const int levels = std::clamp(kWork / free, kFewestLevels, kMostLevels);
    const double work = of > 1 ? kWorkOfMoves : 1;
    const auto stop_at = [&](double share) { this->stop_at(work * (number + share) / of); };
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
  }

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
    add(result, search_.decisions());
    return result;
  }

  void add(const Simulator::Result& result, const std::vector<Decision>& decisions) {
    if (std::none_of(decisions.begin(), decisions.end(), is_moved)) {
      frontier_.add(result, decisions, [&] { return Bus::Cost{result.peak, 0}; });
      return;
    }
    int64_t moved = 0;
    for (size_t i = 0; i < decisions.size(); ++i) {
      if (is_moved(decisions[i])) moved += trace_.contents[i].bytes;
    }
    if (moved > most_moved_) return;
    for (const int64_t level : {result.peak, std::numeric_limits<int64_t>::max() / 2}) {
      frontier_.add(result, decisions, [&] { return bus_.cost(simulator_, decisions, level); });
    }
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
  void improve() {
    const auto free = static_cast<int64_t>(routes_.free.size());
    auto tries = std::min<int64_t>(kTries / free / free, kMostTries);
    for (size_t next = 0; tries > 0 && !search_.is_stopped(); ++next) {
      const std::vector<Plan> plans = frontier_.sorted();
      if (plans.size() < 2) break;
      for (size_t i = 1; i < plans.size() && tries > 0 && !search_.is_stopped(); ++i, --tries) {
        const int32_t content = routes_.free[(next + i * 7) % routes_.free.size()];
        const int64_t level = plans[i - 1].peak - 1;
        search_.set(plans[i].decisions);
        const bool is_kept = plans[i].decisions[content] == Decision::kKeep;
        const Decision other = routes_.can_be_dropped[content] ? Decision::kDrop : Decision::kMove;
        search_.force(content, is_kept ? other : Decision::kKeep);
        search_.lower(level, level);
        search_.put_back(level);
        set(search_.decisions());
      }
    }
  }

  // Tries everything, where that is at most 2^most_enumerated plans.
  void enumerate(int most_enumerated) {
    double plans = 1;
    for (const int32_t content : routes_.free) {
      plans *= 1 + routes_.can_be_dropped[content] + routes_.can_be_moved[content];
    }
    if (plans > std::pow(2, most_enumerated)) return;
    const auto next = [&](int32_t content, Decision decision) {
      if (decision == Decision::kKeep && routes_.can_be_dropped[content]) return Decision::kDrop;
      const bool is_last = decision == Decision::kMove || !routes_.can_be_moved[content];
      return is_last ? Decision::kKeep : Decision::kMove;
    };
    // Counts as an odometer does: what has come round has the next one go on.
    std::vector<Decision> decisions = all_kept();
    const auto& free = routes_.free;
    for (size_t i = 0; i < free.size();) {
      Decision& decision = decisions[free[i]];
      decision = next(free[i], decision);
      if (decision == Decision::kKeep) {
        ++i;
        continue;
      }
      add(simulator_.run(decisions), decisions);
      i = 0;
    }
  }

  const Trace& trace_;
  const store::Speed speed_;
  const int64_t most_moved_;
  int64_t plain_ = 0;  // the peak where everything is kept
  int64_t floor_ = 0;  // no peak is lower
  Simulator simulator_;
  const Bus bus_;
  const Routes routes_;
  Search search_;
  Frontier frontier_;
};

}  // namespace

std::vector<Plan> plans_of(const Trace& trace, int most_enumerated) {
  return Planner(trace).plans(most_enumerated);
}

std::vector<Plan> plans_of(const Trace& trace, const std::vector<Plan>& recompute,
                           store::Speed speed, int64_t most_moved) {
  return Planner(trace, speed, most_moved).plans_from(recompute, kMostEnumerated);
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
  double forward = 0;
  for (const TraceCall& call : trace.calls) forward += call.seconds;
  const double seconds = std::max(3 * forward, 1e-6);  // a backward is about two forwards
  const auto bytes = static_cast<double>(std::max<int64_t>(plans.front().peak, 1));
  const auto cost = [&](const Plan& plan) {
    return plan.seconds / seconds + kPriceOfMemory * static_cast<double>(plan.peak) / bytes;
  };
  return *std::min_element(plans.begin(), plans.end(),
                           [&](const Plan& a, const Plan& b) { return cost(a) < cost(b); });
}

const Plan& plan_within(const std::vector<Plan>& plans, int64_t bytes) {
  const int64_t least = plans.back().peak;
  const int64_t most = least <= bytes ? bytes : least + least / kNearlyLeast;
  return *std::find_if(plans.begin(), plans.end(),
                       [&](const Plan& plan) { return plan.peak <= most; });
}

MovingPlans::MovingPlans(const Trace& trace, const std::vector<Plan>& recompute, store::Speed speed,
                         int64_t most_moved)
    : speed(speed), most_moved(most_moved), plans(plans_of(trace, recompute, speed, most_moved)) {}

std::shared_ptr<const Schedule> MovingPlans::schedule(const Trace& trace, const Plan& plan) {
  const std::lock_guard<Lock> lock(mutex_);
  const auto [place, is_new] = schedules_.try_emplace(&plan);
  if (!is_new) return place->second;
  if (std::none_of(plan.decisions.begin(), plan.decisions.end(), is_moved)) return nullptr;
  Simulator simulator(trace);
  simulator.run(plan.decisions);
  place->second =
      std::make_shared<Schedule>(Bus(trace, speed).schedule(simulator, plan.decisions, plan.peak));
  return place->second;
}

}  // namespace memsave_ext::plan
