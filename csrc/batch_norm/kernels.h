// What a device implements, with raw pointers and without torch: ops.cpp checks the arguments,
// allocates and calls.
//
// Statistics are float, or double for double tensors. Channel vectors (weight, bias, statistics,
// running, gradients of weight and bias) are dense vectors of that type; affine_like_input makes an
// exception for weight and bias. A null weight stands for 1, a null bias for 0. A tensor is dense
// and seen as (outer, channels, inner): (N, C, spatial) if contiguous, (N * spatial, C, 1) if
// channels_last. All tensors of a call share type and layout.
#pragma once

#include <cstddef>
#include <cstdint>

#include "batch_norm/activations.h"
#include "batch_norm/math.h"

namespace memsave_ext::batch_norm {

using vector::DType;
using vector::item_size;

inline int64_t statistic_bytes(DType dtype) { return dtype == DType::kDouble ? 8 : 4; }

// On a CPU a tensor from this size on has memory fresh from the system, left to glibc.
constexpr int64_t kFreshBytes = 32 << 20;

// Calls `function` with a value of the statistics' type for tensors of `dtype`.
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
  const void* residual;  // added before the activation; null if there is none
  const void* weight;
  const void* bias;
  // True: weight and bias have the tensors' type. Only where Kernels::take_affine_like_input.
  bool affine_like_input = false;
  // Kernels::workspace_bytes bytes, aligned to 16; null for kernels that need none.
  void* workspace = nullptr;

  int64_t count() const { return outer * inner; }  // values per channel
};

// Running statistics: running = (1 - momentum) * running + momentum * batch, where the batch's
// variance is the unbiased one. Either pointer may be null.
struct Running {
  void* mean;
  void* var;
  double momentum;
};

// The functions of one device. Tensors must not be empty. `stream` is a cudaStream_t, and null on
// the CPU. No function synchronises.
//
// Results are deterministic: the bits do not depend on the number of threads. If a channel has a
// value that is not finite, its variance is NaN; its mean is NaN on CUDA, as in torch, and on the
// CPU whatever the IEEE sum of the channel is.
struct Kernels {
  // Writes moments (2, C): mean and m2, the sum of squared deviations.
  void (*moments)(const Problem&, void* moments, void* stream);

  // Writes statistics (2, C): mean and 1 / sqrt(m2 / count + eps). Updates the running ones. Then
  // writes output as normalize does.
  void (*forward)(const Problem&, double eps, const Running&, void* statistics, void* output,
                  void* stream);

  // Writes statistics (2, C) from the running ones: mean and 1 / sqrt(var + eps).
  void (*running)(const Problem&, double eps, const Running&, void* statistics, void* stream);

  // Writes output = activate(normalize(input) + residual), with the same bits as forward.
  void (*normalize)(const Problem&, const void* statistics, void* output, void* stream);

  // Writes the gradients; a null one is not wanted. `training`: the statistics depend on the input.
  void (*backward)(const Problem&, const void* statistics, bool training, const void* grad,
                   void* grad_input, void* grad_residual, void* grad_weight, void* grad_bias,
                   void* stream);

  // The two halves of backward, for statistics over several processes. sums (2, C): of the gradient
  // of z (the value before the activation), and of its product with the normalised input. means
  // (2, C): these sums over all processes, divided by the total count.
  void (*backward_sums)(const Problem&, const void* statistics, const void* grad, void* sums,
                        void* stream);
  void (*backward_input)(const Problem&, const void* statistics, const void* means,
                         const void* grad, void* grad_input, void* grad_residual, void* stream);

  // Returns the bytes that any of these functions needs in Problem::workspace; depends on dtype and
  // sizes alone. Null where no function needs any.
  size_t (*workspace_bytes)(const Problem&) = nullptr;
  // Whether weight and bias may have the tensors' type.
  bool take_affine_like_input = false;
};

extern const Kernels cpu_kernels;
extern const Kernels cuda_kernels;  // in a build with CUDA

}  // namespace memsave_ext::batch_norm
