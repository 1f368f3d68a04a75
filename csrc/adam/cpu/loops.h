// What each instruction set implements: loops over a part of one tensor, on one thread.
#pragma once

#include <cstdint>

#include "adam/formats.h"
#include "adam/kernels.h"
#include "vector/isa.h"

namespace memsave_ext::adam::cpu {

// Steps the elements from begin to end. Both are multiples of kBlock, or end is the item's end.
using Step = void (*)(const Item& item, int64_t begin, int64_t end,
                      const Coefficients<double>& coefficients);

// Returns the sum of squares of these values. All instruction sets give the same bits, except for
// doubles.
using SumSquares = double (*)(const void* values, int64_t count);

struct Loops {
  KernelTable<Step> steps;
  SumSquares sum_squares[vector::kDTypes];
};

MEMSAVE_EXT_DECLARE_TABLES(Loops, kLoops)

// Returns the loops for this CPU.
const Loops& loops();

}  // namespace memsave_ext::adam::cpu
