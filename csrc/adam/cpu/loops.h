// What each instruction set implements: loops over a part of one tensor, on one thread.
#pragma once

#include <cstdint>

#include "adam/dispatch.h"
#include "adam/kernels.h"
#include "vector/isa.h"

namespace memsave_ext::adam::cpu {

// Elements from begin to end; begin is a multiple of kBlock, and end is one or the item's.
using Step = void (*)(const Item& item, int64_t begin, int64_t end,
                      const Coefficients<double>& coefficients);

// The sum of squares of these values. The same for all instruction sets, but of doubles.
using SumSquares = double (*)(const void* values, int64_t count);

struct Loops {
  KernelTable<Step> steps;
  Step folds[vector::kDTypes];  // of micro-gradients, with states that are float or double
  SumSquares sum_squares[vector::kDTypes];
};

MEMSAVE_EXT_DECLARE_TABLES(Loops, kLoops)

// Those for this CPU.
const Loops& loops();

}  // namespace memsave_ext::adam::cpu
