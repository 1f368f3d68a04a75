// The numbers of the planner that were chosen and not computed, each with what chose it.
#pragma once

#include <cstdint>

namespace memsave_ext::plan {

// The host's cost of running one operator again, besides the operator's own time.
constexpr double kSecondsPerCall = 4e-6;

// The search. Those that were measured were measured on 62 traces and 200 random graphs, as the
// time that plans take at the same peak.

// An operator runs again at most so often, except under the last plan.
constexpr int kMostRuns = 2;
// A move whose score is smaller than the best bound by less than this factor is taken. With 1,
// chains take 7 % more time; with 1.5, the lowest peaks are 2 to 13 % higher.
constexpr double kTolerance = 1.2;
// Moves that take no time are worth as if they took this.
constexpr double kLeastSeconds = 1e-9;
// So many levels of memory are planned for. Those of large traces are searched for a few, and what
// is between them is made from these.
constexpr int kLevels = 64, kFewestLevels = 8, kMostLevels = 256, kWork = 25000;
// Tries to improve plans: so many by the square of what can be dropped.
constexpr int64_t kTries = 20000000;
// The most work that a trace is worth, in visits as Search::stop_at() counts them, so that planning
// takes about 0.1 s for 1,000 operators, and a second or two. Clocks are noisy, plans must not be.
constexpr int64_t kLeastWork = 16000000, kWorkPerOperator = 16000, kMostWork = 160000000;
// The most segments to start from, and how many such starts are followed. On 24 chains of 30 to
// 1,000 operators, lowest peaks are 4 % higher with 16 segments, and up to 8 % with 2 starts.
constexpr int kMostSegments = 64, kStarts = 3;

// Moving.

// What is smaller is not moved: handing it over takes longer than copying it.
constexpr int64_t kLeastMoved = 64 << 10;
// The host's cost of moving a content out and back, besides that of a call.
constexpr double kSecondsPerMove = 2e-5;
// A backward takes about so many forwards.
constexpr double kBackward = 2;
// Copies back begin earlier by this factor of their time than they would have to.
constexpr double kEarly = 1.5;

}  // namespace memsave_ext::plan
