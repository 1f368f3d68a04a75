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
};

// With contents_mutex(). `locked` gets what must stay alive until the mutex is let go.
Plan plan_for(const Content& content, Freed& locked);

// Whether to go by the plan, and why not. `everything`: wherever it is possible.
Verdict judge(const Content& content, const Plan& plan, bool everything);

// How many seconds a byte may take that is computed again.
double seconds_per_byte();

}  // namespace memsave_ext::remat
