// What a device implements. Raw pointers, no torch: ops.cpp checks, allocates and calls.
//
// `Statistic` is float, and double for double tensors. Channel vectors (weight, bias, statistics,
// running, gradients of weight and bias) are dense vectors of that type, but as affine_like_input
// says; null weight means 1, null bias 0. A tensor is dense, and is seen as (outer, channels,
// inner): contiguous (N, C, spatial), channels_last (N * spatial, C, 1). All tensors of a call
// share type and layout.
#pragma once

#include <cstddef>
#include <cstdint>

#include "batch_norm/activations.h"
#include "batch_norm/math.h"

namespace memsave_ext::batch_norm {

using vector::DType;
using vector::item_size;

inline int64_t statistic_bytes(DType dtype) { return dtype == DType::kDouble ? 8 : 4; }

// Calls function with a value of the type of statistics.
template <typename Function>
void with_statistic(DType dtype, const Function& function) {
  dtype == DType::kDouble ? function(double{}) : function(float{});
}

struct Problem {
  DType dtype;
  int64_t outer;
  int64_t channels;
  int64_t inner;
  Activation activation;
  double negative_slope;
  const void* input;
  const void* residual;  // null without one; added before the activation
  const void* weight;
  const void* bias;
  bool affine_like_input = false;  // these two are of the tensors' type, where Kernels says so
  void* workspace = nullptr;  // workspace_bytes(problem) bytes, aligned to 16; null where that is 0

  int64_t count() const { return outer * inner; }  // values per channel
};

// running = (1 - momentum) * running + momentum * batch; the variance unbiased. Either may be null.
struct Running {
  void* mean;
  void* var;
  double momentum;
};

// One for each device, for tensors with values; `stream` is a cudaStream_t, null on the CPU.
// Nothing synchronises.
//
// Deterministic: the same bits whatever the number of threads. A value that is not finite makes its
// channel's variance NaN and its mean what IEEE's sum of the channel is; on CUDA NaN, as torch's.
struct Kernels {
  // moments (2, C): mean and m2, the sum of squared deviations.
  void (*moments)(const Problem&, void* moments, void* stream);

  // statistics (2, C): mean and 1 / sqrt(m2 / count + eps). Then as normalize.
  void (*forward)(const Problem&, double eps, const Running&, void* statistics, void* output,
                  void* stream);

  // statistics (2, C) from running ones: mean and 1 / sqrt(var + eps).
  void (*running)(const Problem&, double eps, const Running&, void* statistics, void* stream);

  // output = activate(normalize(input) + residual): the same bits as forward wrote.
  void (*normalize)(const Problem&, const void* statistics, void* output, void* stream);

  // Any of the gradients may be null. `training`: statistics depend on the input.
  void (*backward)(const Problem&, const void* statistics, bool training, const void* grad,
                   void* grad_input, void* grad_residual, void* grad_weight, void* grad_bias,
                   void* stream);

  // The two halves of backward, for statistics of several processes. sums (2, C): over the gradient
  // of z, and over its product with the normalised input. means: the same, over the whole count.
  void (*backward_sums)(const Problem&, const void* statistics, const void* grad, void* sums,
                        void* stream);
  void (*backward_input)(const Problem&, const void* statistics, const void* means,
                         const void* grad, void* grad_input, void* grad_residual, void* stream);

  // What Problem::workspace must hold for any of these, by dtype and sizes alone. Null: nothing.
  size_t (*workspace_bytes)(const Problem&) = nullptr;
  // Whether weight and bias may be of the tensors' type.
  bool take_affine_like_input = false;
};

extern const Kernels cpu_kernels;
extern const Kernels cuda_kernels;  // in a build with CUDA

}  // namespace memsave_ext::batch_norm
