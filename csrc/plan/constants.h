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
// A change whose score is smaller than the best bound by less than this factor is taken. With 1,
// chains take 7 % more time; with 1.5, the lowest peaks are 2 to 13 % higher.
constexpr double kTolerance = 1.2;
// Changes that take no time are worth as if they took this.
constexpr double kLeastSeconds = 1e-9;
// So many levels of memory are planned for. Those of large traces are searched for a few, and what
// is between them is made from these.
constexpr int kLevels = 64, kFewestLevels = 8, kMostLevels = 256, kWork = 25000;
// The lowest peak is lowered by such a part of what is left, again and again.
constexpr int64_t kParts = 8;
// All plans are tried where they are at most 2 to the power of this: some 10 ms. Without, plans of
// small random graphs take 12.5 % more time.
constexpr int kMostEnumerated = 14;
// Tries to improve plans: so many by the square of what can be dropped, and at most this many.
constexpr int64_t kTries = 20000000, kMostTries = 600;
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
// Plans are searched with each of these prices of the bus: a copy costs so much of its time.
// Nothing is known yet of what the step will wait for, which is all of it where the bus is always
// busy. On 36 traces with one or two speeds, plans with 1, 0.3 and 0.1 of it take up to 7 % of a
// step more than those that move alone, with these up to 0.7 %; five prices are no better.
constexpr double kPricesOfBus[] = {0.3, 0.03, 0};
// All of these searches are worth so many times the work of one without moves. With less, the least
// peak of 96 layers is higher; with 3, they take twice the time for 0.1 points of a step.
constexpr double kWorkOfMoves = 1.5;
// A backward takes about so many forwards.
constexpr double kBackward = 2;
// Copies back begin earlier by this factor of their time than they would have to.
constexpr double kEarly = 1.5;

// Choosing.

// Without a budget, a percent of the step's peak is worth a quarter of a percent of its time. A
// sixth takes 2 to 3 points less time of convolutional nets, and keeps up to 22 points more.
constexpr double kPriceOfMemory = 0.25;
// Where no plan fits, the fastest within a two-hundredth of the least peak is as good: the last few
// bytes may take most of the time. Of a GPT's plans with offload the least one takes 26 ms, that
// one 10.
constexpr int64_t kNearlyLeast = 200;

}  // namespace memsave_ext::plan
