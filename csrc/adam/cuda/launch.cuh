// What is launched: the table of step kernels.
#pragma once

#include <cstdint>

#include "adam/cuda/batch.cuh"
#include "adam/dispatch.h"
#include "vector/launch.cuh"

namespace memsave_ext::adam {

constexpr int kThreads = 256;

using StepKernel = void (*)(Batch);

using StepKernels = KernelTable<StepKernel>;

// By the format of the states, each in its own source: they compile side by side. Null where a
// combination does not exist, or has states in another format.
extern const StepKernels steps_as_param, steps_float, steps_bfloat16, steps_blocks;

// Of a fold, which neither the parameter nor amsgrad's state takes part in.
StepKernel fold_kernel_of(DType param);

void launch_measure(const Item* items, int64_t count, const Measure& measure, void* workspace,
                    void* stream);
int64_t measure_workspace(const Item* items, int64_t count);

}  // namespace memsave_ext::adam
