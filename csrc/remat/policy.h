// Decides which saved contents are dropped: those that are cheap to recompute from what is kept.
#pragma once

#include <memory>
#include <vector>

#include "remat/block.h"
#include "remat/content.h"

namespace memsave_ext::remat {

// How a content is recomputed: what from, through what, and what that takes.
struct Route {
  bool possible = true;
  double seconds = 0;                                // estimated
  int64_t more_bytes = 0;                            // that would be kept only for this
  int dropped_depth = 0;                             // the largest of the contents in `needs`
  std::vector<std::shared_ptr<Content>> needs;       // that it is computed from
  std::vector<std::shared_ptr<Content>> on_the_way;  // also recomputed, since nobody saved them
};

// The caller holds contents_mutex(). `locked` receives what must stay alive until it is released.
Route route_to(const Content& content, Freed& locked);

// Whether all memory that a dropped content is computed from is still there. The caller holds
// contents_mutex().
bool has_all_memory(const Content& content);

// Decides whether a content is dropped, given the route to it, or why not.
Verdict judge(const Content& content, const Route& route, Drops drops);

// Returns how long copying `bytes` takes within the cache; the speed is measured once.
double seconds_of_copy(int64_t bytes);

}  // namespace memsave_ext::remat
