// Which saved contents are dropped: those that are cheap to compute again from what is kept.
#pragma once

#include <memory>
#include <vector>

#include "remat/block.h"
#include "remat/content.h"

namespace memsave_ext::remat {

// What computing a content again would take.
struct Plan {
  bool possible = true;
  double seconds = 0;
  int64_t more_bytes = 0;  // that nobody else keeps
  int dropped_depth = 0;
  std::vector<std::shared_ptr<Content>> needs;
  std::vector<std::shared_ptr<Content>> on_the_way;  // computed again, too, and kept by nobody
};

// With contents_mutex(). `locked` gets what must stay alive until the mutex is let go.
Plan plan_for(const Content& content, Freed& locked);

// With contents_mutex(). Whether what a dropped content is computed from is all still there.
bool has_all_memory(const Content& content);

// Whether to go by the plan, and why not.
Verdict judge(const Content& content, const Plan& plan, Drops drops);

// That a copy of so many bytes takes within the cache; measured once.
double seconds_of_copy(int64_t bytes);

}  // namespace memsave_ext::remat
