// Plans to begin a search with: keep what crosses between a few segments of the forward.
#pragma once

#include <vector>

#include "remat/routes.h"

namespace memsave_ext::remat {

// Returns decisions that drop what is made and read in the same of about `segments` segments.
std::vector<Decision> drop_within_segments(const Trace& trace, const Routes& routes, int segments);

}  // namespace memsave_ext::remat
