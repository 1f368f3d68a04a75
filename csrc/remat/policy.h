// Decides which saved contents are dropped: those that are cheap to recompute from what is kept.
#pragma once

#include <memory>
#include <optional>

#include "remat/content.h"

namespace memsave_ext::remat {

enum class Drops {
  kNothing,     // to measure what recording costs
  kCheap,       // what is cheap to recompute
  kEverything,  // in tests: whatever can be recomputed
  kUntilFull,   // nothing, until the budget is full
  kMove,        // nothing: it is moved to the store
  kBoth,        // in tests: every second one is moved, the others are dropped
};
// What a step decides on a content.
struct Choice {
  Drops drops;
  bool held_on_the_way = true;  // see Content
  // Where a plan keeps it: whether it could be recomputed. Else that is to be found out.
  std::optional<bool> is_possible = std::nullopt;
  // It may be dropped yet when it is kept, because there is no plan.
  bool may_drop_later = false;
  // Where it is moved: see Mover::want().
  int32_t lingers_from = 0;
  // What an earlier step has found out why it is kept; else that is to be found out.
  std::optional<Verdict> verdict = std::nullopt;
};

// What it takes to recompute a content.
struct Route {
  bool possible = true;
  double seconds = 0;      // estimated
  int64_t more_bytes = 0;  // that would be kept only for this
  int dropped_depth = 0;   // the largest of the contents in `needs`
  Contents needs;          // that it is computed from
  Contents on_the_way;     // also recomputed, since nobody saved them
};

// The caller holds contents_mutex(). `locked` receives what must stay alive until it is released.
Route find_route(const Content& content, Freed& locked);

// Returns the bytes of what is recomputed on the route, through all dropped contents that it needs;
// it stops at more than `enough`. The caller holds contents_mutex().
int64_t bytes_on(const Route& route, int64_t enough);

// Whether all memory that a dropped content is computed from is still there. The caller holds
// contents_mutex().
bool has_all_memory(const Content& content);

// Decides whether a content is dropped, given the route to it, or why not.
Verdict judge(const Content& content, const Route& route, Drops drops);

// Returns how long copying `bytes` takes within the cache; the speed is measured once.
double seconds_of_copy(int64_t bytes);

}  // namespace memsave_ext::remat
