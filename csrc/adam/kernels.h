// What a device implements. Raw pointers, no torch: step.cpp checks, collects and calls.
#pragma once

#include <cstdint>

#include "adam/math.h"

namespace memsave_ext::adam {

using vector::DType;

// A parameter with its gradient and state: dense, all in the same order of elements. Computed in
// float, and in double where the parameter is double.
struct Item {
  void* param;
  const void* grad;  // of the parameter's type
  void* exp_avg;     // the states: of the parameter's type, or float
  void* exp_avg_sq;
  void* max_exp_avg_sq;  // null without amsgrad
  int64_t numel;
  DType param_type;
  DType state_type;
  double step;               // the number of this step, from 1
  const float* device_step;  // on CUDA: read there in place of `step`, where not null
  const float* device_lr;    // on CUDA: read there in place of options->lr, where not null
  const Options* options;
};

struct Kernels {
  // Steps all items; they do not overlap. `stream` is a cudaStream_t, null on the CPU.
  void (*step)(const Item* items, int64_t count, void* stream);

  // Adds 1 to each of these device scalars. Null on the CPU.
  void (*advance)(float* const* steps, int64_t count, void* stream);
};

extern const Kernels cpu_kernels;
extern const Kernels cuda_kernels;  // of a CUDA build

}  // namespace memsave_ext::adam
