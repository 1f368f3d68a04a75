// The kernels that are launched, and the table of those that step.
#pragma once

#include <cstdint>

#include "adam/cuda/batch.cuh"
#include "adam/formats.h"
#include "vector/launch.cuh"

namespace memsave_ext::adam {

constexpr int kThreads = 256;

using StepKernel = void (*)(Batch);

using StepKernels = KernelTable<StepKernel>;

// Returns the step kernels for states in this format. Each format has its own source, step_*.cu, so
// that they compile in parallel. A kernel is null where its combination does not exist, or has
// states in another format.
template <StateFormat states>
const StepKernels& steps_with();

void launch_measure(const Item* items, int64_t count, const Measure& measure, void* workspace,
                    void* stream);
int64_t measure_workspace(const Item* items, int64_t count);

}  // namespace memsave_ext::adam
