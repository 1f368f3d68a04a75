// What each instruction set implements: steps of a part of one tensor, on one thread.
#pragma once

#include <cstdint>

#include "adam/kernels.h"

namespace memsave_ext::adam::cpu {

// Elements from begin to end.
using Step = void (*)(const Item& item, int64_t begin, int64_t end,
                      const Coefficients<double>& coefficients);

// [DType of the parameter][whether the states are float][amsgrad]; null for double with float.
using StepTable = Step[4][2][2];

extern const StepTable& baseline_steps;
#if defined(__x86_64__)
extern const StepTable& avx2_steps;
extern const StepTable& avx512_steps;
#endif

}  // namespace memsave_ext::adam::cpu
