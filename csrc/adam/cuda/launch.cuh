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

// Of states in this format, each in its own source, step_*.cu: they compile side by side. Null
// where a combination does not exist, or has states in another format.
template <StateFormat states>
const StepKernels& steps_with();

// Of a fold, which neither the parameter nor amsgrad's state takes part in.
StepKernel fold_kernel_of(DType param);

void launch_measure(const Item* items, int64_t count, const Measure& measure, void* workspace,
                    void* stream);
int64_t measure_workspace(const Item* items, int64_t count);

}  // namespace memsave_ext::adam
