// What forward and backward compute for each value. All kernels call these functions, so that a
// value has the same bits everywhere.
#pragma once

#include "batch_norm/cuda/access.cuh"

namespace memsave_ext::batch_norm {

// The coefficients that turn x into z, the value before the activation, for the channels of a
// thread. scale is invstd * weight.
template <typename A>
struct Affine {
  using Value = typename A::Value;
  Value mean[A::kChannels], invstd[A::kChannels], scale[A::kChannels], bias[A::kChannels];

  __device__ __forceinline__ Affine(const Problem& problem, const void* statistics,
                                    const Channels& channels) {
    const Value* values = static_cast<const Value*>(statistics);
    load_channels<A, Value>(values, channels, Value(0), mean);
    load_channels<A, Value>(values + problem.channels, channels, Value(0), invstd);
    load_parameters(problem, channels);
  }

  // For a thread with one channel; `statistics` are its mean and invstd.
  __device__ __forceinline__ Affine(const Problem& problem, const Pair<Value>& statistics,
                                    const Channels& channels)
      : mean{statistics.first}, invstd{statistics.second} {
    load_parameters(problem, channels);
  }

 private:
  __device__ __forceinline__ void load_parameters(const Problem& problem,
                                                  const Channels& channels) {
    if (sizeof(typename A::Element) == 2 && problem.affine_like_input) {
      load_parameters_of<typename A::Element>(problem, channels);
    } else {
      load_parameters_of<Value>(problem, channels);
    }
#pragma unroll
    for (int c = 0; c < A::kChannels; ++c) scale[c] *= invstd[c];
  }

  template <typename Stored>
  __device__ __forceinline__ void load_parameters_of(const Problem& problem,
                                                     const Channels& channels) {
    load_channels<A, Stored>(problem.weight, channels, Value(1), scale);
    load_channels<A, Stored>(problem.bias, channels, Value(0), bias);
  }
};

// Loads the residual at all places if `wanted`, with one branch for all of them.
template <typename A, int count>
__device__ __forceinline__ void load_residual(bool wanted, const Problem& problem,
                                              const Partition& p, const Place (&places)[count],
                                              typename A::Vec (&residual)[count]) {
  if (wanted) load_all<A>(problem.residual, p, places, residual);
}

// Returns z of the value at place i of a vector. `residual` is read only if the problem has one.
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
    // The activation is chosen at run time: kernels that are bound by memory have the time, and
    // fewer kernels are compiled.
    output[i] = Activations::forward(problem.activation, z, slope);
  }
  return A::Vec::from(output);
}

// Whether backward needs the residual, which it does for the sign of z.
__host__ __device__ inline bool masks_with_residual(const Problem& problem) {
  return problem.residual != nullptr && problem.activation != Activation::kIdentity;
}

// Returns the gradient of z from that of the output, at place i of a vector.
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

// Adds to a thread's two sums, of the values in `mask`: the gradients of z, and their products with
// x - mean.
template <typename A, typename Sums>
__device__ __forceinline__ void add_gradients(const Problem& problem, const Affine<A>& affine,
                                              const typename A::Vec& grad, const typename A::Vec& x,
                                              const typename A::Vec& residual, uint32_t mask,
                                              Sums& sums) {
  using Value = typename A::Value;
#pragma unroll
  for (int i = 0; i < A::kVector; ++i) {
    const Value of_z = gradient_of_z(problem, affine, grad, x, residual, i);
    const Value added = A::keep(mask, i, of_z);
    sums.first[i] += added;
    sums.second[i] += added * A::keep(mask, i, x[i] - affine.mean[A::channel(i)]);
  }
}

// Means over a channel: of the gradient of z, and of its product with the normalised x.
template <typename A>
struct GradientMeans {
  using Value = typename A::Value;
  Value grad[A::kChannels], dot[A::kChannels];
};

// Writes the gradients of a place's values; a null pointer means that one is not wanted.
template <typename A>
__device__ __forceinline__ void write_gradients(const Problem& problem, const Affine<A>& affine,
                                                const GradientMeans<A>& means,
                                                const typename A::Vec& grad,
                                                const typename A::Vec& x,
                                                const typename A::Vec& residual, const Place& place,
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
  if (grad_input != nullptr) store_at<A>(grad_input, place, A::Vec::from(to_input));
  if (grad_residual != nullptr) store_at<A>(grad_residual, place, A::Vec::from(to_residual));
}

}  // namespace memsave_ext::batch_norm
