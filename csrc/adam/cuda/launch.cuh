// What is launched: the table of step kernels.
#pragma once

#include <cstdint>

#include "adam/cuda/batch.cuh"
#include "vector/launch.cuh"

namespace memsave_ext::adam {

constexpr int kThreads = 256;

using StepKernel = void (*)(Batch);

// By the format of the states, each in its own source: they compile side by side. Null where
// formats.h knows no such combination.
StepKernel step_as_param(DType param, ParamFormat format, bool amsgrad);
StepKernel step_float(DType param, ParamFormat format, bool amsgrad);
StepKernel step_bfloat16(DType param, ParamFormat format, bool amsgrad);
StepKernel step_blocks(DType param, ParamFormat format);

// Of a fold, which neither the parameter nor amsgrad's state takes part in. Null likewise.
StepKernel fold_kernel_of(DType param, StateFormat states);

void launch_measure(const Item* items, int64_t count, const Measure& measure, void* workspace,
                    void* stream);
int64_t measure_workspace(const Item* items, int64_t count);

}  // namespace memsave_ext::adam
