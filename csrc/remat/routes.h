// Which contents of a trace can be dropped, what each is recomputed from, and what that takes.
#pragma once

#include <cstdint>
#include <vector>

#include "remat/simulate.h"

namespace memsave_ext::remat {

// The calls of contents that can be dropped, by number.
struct Repeat {
  std::vector<int32_t> makes;  // contents that can be dropped
  std::vector<int32_t> reads;  // such contents, directly or through what nobody saved
  std::vector<int32_t> calls;  // that make what nobody saved, on the way
  double seconds = 0;          // with these
};

struct Routes {
  explicit Routes(const Simulator& simulator);

  std::vector<Repeat> repeats;              // in the order of forward
  std::vector<int32_t> droppable;           // contents, in the order of their making
  std::vector<int32_t> repeat_of;           // by content: that makes it; -1: it is not droppable
  std::vector<std::vector<int32_t>> users;  // by content: the repeats that read it
};

}  // namespace memsave_ext::remat
