// What is done to a value, forward and backward. Every kernel that needs a value calls these: the
// same bits everywhere.
#pragma once

#include "batch_norm/cuda/access.cuh"

namespace memsave_ext::batch_norm {

// What turns x into z, for the channels of a thread.
template <typename A>
struct Affine {
  using Value = typename A::Value;
  Value mean[A::kChannels], invstd[A::kChannels], scale[A::kChannels], bias[A::kChannels];

  __device__ __forceinline__ Affine(const Problem& problem, const void* statistics,
                                    int64_t channel) {
    const Value* values = static_cast<const Value*>(statistics);
    load_channels<Value>(values, channel, Value(0), mean);
    load_channels<Value>(values + problem.channels, channel, Value(0), invstd);
    load_parameters(problem, channel);
  }

  // A thread with one channel, from its mean and invstd.
  __device__ __forceinline__ Affine(const Problem& problem, const Pair<Value>& statistics,
                                    int64_t channel)
      : mean{statistics.first}, invstd{statistics.second} {
    load_parameters(problem, channel);
  }

 private:
  __device__ __forceinline__ void load_parameters(const Problem& problem, int64_t channel) {
    if (sizeof(typename A::Element) == 2 && problem.affine_like_input) {
      load_parameters_of<typename A::Element>(problem, channel);
    } else {
      load_parameters_of<Value>(problem, channel);
    }
#pragma unroll
    for (int c = 0; c < A::kChannels; ++c) scale[c] *= invstd[c];
  }

  template <typename Stored>
  __device__ __forceinline__ void load_parameters_of(const Problem& problem, int64_t channel) {
    load_channels<Stored>(problem.weight, channel, Value(1), scale);
    load_channels<Stored>(problem.bias, channel, Value(0), bias);
  }
};

// At all offsets, if it is wanted: one branch for them all.
template <typename Vec, int count>
__device__ __forceinline__ void load_residual(bool wanted, const Problem& problem,
                                              const int64_t (&offsets)[count],
                                              Vec (&residual)[count]) {
  if (!wanted) return;
#pragma unroll
  for (int u = 0; u < count; ++u) residual[u] = load<Vec>(problem.residual, offsets[u]);
}

// z of the value at a place in a vector. The residual is looked at where the problem has one.
template <typename A>
__device__ __forceinline__ typename A::Value preactivation(const Problem& problem,
                                                           const Affine<A>& affine,
                                                           const typename A::Vec& x,
                                                           const typename A::Vec& residual, int i) {
  const int c = A::channel(i);
  const typename A::Value z = normalize(x[i], affine.mean[c], affine.scale[c], affine.bias[c]);
  return problem.residual == nullptr ? z : z + residual[i];
}

template <typename A>
__device__ __forceinline__ typename A::Vec output_of(const Problem& problem,
                                                     const Affine<A>& affine,
                                                     const typename A::Vec& x,
                                                     const typename A::Vec& residual) {
  using Value = typename A::Value;
  const Value slope = static_cast<Value>(problem.negative_slope);
  Value output[A::kVector];
#pragma unroll
  for (int i = 0; i < A::kVector; ++i) {
    const Value z = preactivation(problem, affine, x, residual, i);
    // Chosen at run time: kernels bound by memory have time for it, and are fewer.
    output[i] = Activations::forward(problem.activation, z, slope);
  }
  return A::Vec::from(output);
}

// Whether backward needs the residual: for the sign of z.
__host__ __device__ inline bool masks_with_residual(const Problem& problem) {
  return problem.residual != nullptr && problem.activation != Activation::kIdentity;
}

// The gradient of z from that of the output.
template <typename A>
__device__ __forceinline__ typename A::Value gradient_of_z(const Problem& problem,
                                                           const Affine<A>& affine,
                                                           const typename A::Vec& grad,
                                                           const typename A::Vec& x,
                                                           const typename A::Vec& residual, int i) {
  using Value = typename A::Value;
  const Value slope = static_cast<Value>(problem.negative_slope);
  const Value of_output = grad[i];
  if (problem.activation == Activation::kIdentity) return of_output;
  const Value z = preactivation(problem, affine, x, residual, i);
  return Activations::backward(problem.activation, of_output, z, slope);
}

// Adds the gradients of z, and their products with x less its mean, to a thread's two sums.
template <typename A, typename Sums>
__device__ __forceinline__ void add_gradients(const Problem& problem, const Affine<A>& affine,
                                              const typename A::Vec& grad, const typename A::Vec& x,
                                              const typename A::Vec& residual, Sums& sums) {
#pragma unroll
  for (int i = 0; i < A::kVector; ++i) {
    const auto of_z = gradient_of_z(problem, affine, grad, x, residual, i);
    sums.first[i] += of_z;
    sums.second[i] += of_z * (x[i] - affine.mean[A::channel(i)]);
  }
}

// Means over a channel, of the gradient of z and of its product with the normalised x.
template <typename A>
struct GradientMeans {
  using Value = typename A::Value;
  Value grad[A::kChannels], dot[A::kChannels];
};

// Writes what is wanted of a vector's gradients.
template <typename A>
__device__ __forceinline__ void write_gradients(const Problem& problem, const Affine<A>& affine,
                                                const GradientMeans<A>& means,
                                                const typename A::Vec& grad,
                                                const typename A::Vec& x,
                                                const typename A::Vec& residual, int64_t offset,
                                                void* grad_input, void* grad_residual) {
  using Value = typename A::Value;
  Value to_input[A::kVector], to_residual[A::kVector];
#pragma unroll
  for (int i = 0; i < A::kVector; ++i) {
    const int c = A::channel(i);
    to_residual[i] = gradient_of_z(problem, affine, grad, x, residual, i);
    to_input[i] = input_gradient(to_residual[i], x[i], affine.mean[c], affine.invstd[c],
                                 affine.scale[c], means.grad[c], means.dot[c]);
  }
  if (grad_input != nullptr) store(grad_input, offset, A::Vec::from(to_input));
  if (grad_residual != nullptr) store(grad_residual, offset, A::Vec::from(to_residual));
}

}  // namespace memsave_ext::batch_norm
