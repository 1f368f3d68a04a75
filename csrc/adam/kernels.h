// What a device implements, on raw pointers and without torch: ops.cpp checks and collects the
// tensors and calls it.
#pragma once

#include <cstdint>

#include "adam/formats.h"
#include "adam/math.h"

namespace memsave_ext::adam {

// A parameter with its gradient and state: dense, and all in the same order of elements. The step
// computes in double where the parameter is double, else in float. Pointers point to device memory.
struct Item {
  void* param;
  void* param_low_part;  // of the format's type
  const void* grad;      // of the parameter's type
  void* exp_avg;         // moments are stored as state_format says, and null where the rule has
  void* exp_avg_sq;      // fewer, and this one where exp_avg has both: is_joint()
  void* max_exp_avg_sq;
  float* exp_avg_scale;     // one float per block; only of states in blocks
  float* exp_avg_sq_scale;  // the same
  int64_t numel;
  DType param_type;
  ParamFormat param_format;
  StateFormat state_format;
  uint32_t position;         // of the parameter in the optimizer
  int64_t first_block;       // of its first element in the parameter, in units of kBlock
  double step;               // the number of this step, from 1; 0 where steps are not counted
  const float* device_step;  // on CUDA: read there in place of `step`, where not null
  const float* device_lr;    // read there in place of options->lr, where not null
  const double* factor;      // the gradient is multiplied by it; null: by 1
  const float* skip;         // the item is skipped where this is not 0; may be null
  const Options* options;

  // The combination whose kernel steps the item.
  Combination combination() const {
    return {param_type, param_format, state_format, options->rule};
  }
};

// What measure() computes from each gradient's own sum of squares. Pointers point to device memory:
// the outputs from `squares` on are arrays with an element per item, `found_inf` is one scalar.
struct Measure {
  const float* grad_scale;  // the gradients are divided by it; null: by 1
  double max_norm;          // and then clipped to this norm, like clip_grad_norm_; 0: not clipped
  double* squares;          // the sums, before division by the scale; each output may be null
  double* factors;          // by which the gradients are to be multiplied
  float* skips;             // 1 where a gradient has a value that is not finite, else 0
  float* found_inf;         // set to 1 where any gradient has one, else left unchanged
};

// `stream` is a cudaStream_t, null on the CPU. No function synchronises. Results are bit-identical
// for any number of threads.
struct Kernels {
  // Steps all items, whose memory must not overlap.
  void (*step)(const Item* items, int64_t count, void* stream);

  // Adds 1 to each of these device scalars, except where its skip is not null and points to a value
  // other than 0. This function is null on the CPU.
  void (*advance)(float* const* steps, const float* const* skips, int64_t count, void* stream);

  // Measures the items' gradients; only grad, param_type and numel of each item are read.
  // `workspace` has measure_workspace() bytes and is aligned to 16.
  void (*measure)(const Item* items, int64_t count, const Measure& measure, void* workspace,
                  void* stream);
  int64_t (*measure_workspace)(const Item* items, int64_t count);
};

extern const Kernels cpu_kernels;
extern const Kernels cuda_kernels;  // only in a CUDA build

}  // namespace memsave_ext::adam
