// What each instruction set implements: loops over the tokens from begin to end, on one thread.
#pragma once

#include <cstdint>

#include "loss_head/kernels.h"
#include "vector/isa.h"

namespace memsave_ext::loss_head::cpu {

struct Loops {
  void (*reduce)(const Chunk& chunk, void* sums, int64_t begin, int64_t end);
  void (*gradient)(const Chunk& chunk, const void* coefficients, int64_t begin, int64_t end);
};

struct AllLoops {
  Loops loops[vector::kDTypes];
};

MEMSAVE_EXT_DECLARE_TABLES(AllLoops, kAllLoops)

// Returns the loops for this CPU.
const Loops& loops_of(DType dtype);

}  // namespace memsave_ext::loss_head::cpu
