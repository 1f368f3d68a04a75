// What a device implements. Raw pointers, no torch: step.cpp checks, collects and calls.
#pragma once

#include <cstdint>

#include "adam/formats.h"
#include "adam/math.h"

namespace memsave_ext::adam {

// A parameter with its gradient and state: dense, all in the same order of elements. Computed in
// float, and in double where the parameter is double. Pointers are to the device's memory.
struct Item {
  void* param;
  void* param_rest;  // with kKahan and kSplit
  const void* grad;  // of the parameter's type; null for zeros
  void* exp_avg;     // the states, as state_format says
  void* exp_avg_sq;
  void* max_exp_avg_sq;     // null without amsgrad
  float* exp_avg_scale;     // of each block, with kBlocks
  float* exp_avg_sq_scale;  // likewise
  int64_t numel;
  DType param_type;
  ParamFormat param_format;
  StateFormat state_format;
  Phase phase;               // other than kWhole with states of float and double alone
  uint32_t position;         // of the parameter in the optimizer
  double step;               // the number of this step, from 1
  const float* device_step;  // on CUDA: read there in place of `step`, where not null
  const float* device_lr;    // on CUDA: read there in place of options->lr, where not null
  const double* factor;      // the gradient is multiplied by it; null: by 1
  const float* skip;         // nothing is done where this is not 0; may be null
  const Options* options;

  // What it is stepped by, where it is not a fold.
  Combination combination() const {
    return {param_type, param_format, state_format, max_exp_avg_sq != nullptr,
            phase == Phase::kClose};
  }
};

// What is made of the sums of squares of gradients, each by itself. All on the device.
struct Measure {
  const float* loss_scale;  // what the gradients are divided by; null: 1
  double max_norm;          // then clipped to this norm, as torch's clip_grad_norm_ does; 0: not
  double* squares;          // the sums, of the gradients as they are; any of these may be null
  double* factors;          // what the gradients are to be multiplied by
  float* skips;             // 1 where a gradient has a value that is not finite, else 0
  float* found;             // set to 1 where any has; left as it is otherwise
};

// `stream` is a cudaStream_t, null on the CPU. Nothing synchronises. The same bits whatever the
// number of threads.
struct Kernels {
  // Steps all items; they do not overlap.
  void (*step)(const Item* items, int64_t count, void* stream);

  // Adds 1 to each of these device scalars, but where its skip, if not null, is not 0. Null on the
  // CPU.
  void (*advance)(float* const* steps, const float* const* skips, int64_t count, void* stream);

  // Of items, grad, param_type and numel are read. `workspace` has measure_workspace() bytes,
  // aligned to 16.
  void (*measure)(const Item* items, int64_t count, const Measure& measure, void* workspace,
                  void* stream);
  int64_t (*measure_workspace)(const Item* items, int64_t count);
};

extern const Kernels cpu_kernels;
extern const Kernels cuda_kernels;  // of a CUDA build

}  // namespace memsave_ext::adam
