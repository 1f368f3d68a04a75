// The arithmetic of batch normalisation, the same for CPU and CUDA. normalize and input_gradient
// use only operators, so that T may be a scalar or a vector. Compilers contract a * b + c, in the
// same way wherever the function is used.
#pragma once

#include <cmath>
#include <cstdint>

#include "vector/types.h"

namespace memsave_ext::batch_norm {

// Count, mean and sum of squared deviations from the mean.
template <typename T>
struct Moments {
  int64_t count = 0;
  T mean = 0;
  T m2 = 0;
};

// Returns the moments of the union of two sets (Chan, Golub and LeVeque 1983).
template <typename T>
MEMSAVE_EXT_INLINE Moments<T> merge(const Moments<T>& a, const Moments<T>& b) {
  if (b.count == 0) return a;
  if (a.count == 0) return b;
  const int64_t count = a.count + b.count;
  const T share = static_cast<T>(b.count) / static_cast<T>(count);
  const T delta = b.mean - a.mean;
  return {count, a.mean + delta * share,
          a.m2 + b.m2 + delta * delta * share * static_cast<T>(a.count)};
}

// Updates the running statistic of a channel; does nothing where `running` is null.
template <typename T>
MEMSAVE_EXT_INLINE void update(void* running, int64_t channel, double momentum, double batch) {
  if (running == nullptr) return;
  T& value = static_cast<T*>(running)[channel];
  value = static_cast<T>((1 - momentum) * value + momentum * batch);
}

// Returns 1 / sqrt(var + eps) for a running variance; that of a batch is computed in double.
template <typename T>
MEMSAVE_EXT_INLINE T invstd_of(T var, double eps) {
  return 1 / std::sqrt(var + static_cast<T>(eps));
}

// `scale` is invstd * weight. x * scale + (bias - mean * scale) would cancel for large means.
template <typename T>
MEMSAVE_EXT_INLINE T normalize(T x, T mean, T scale, T bias) {
  return (x - mean) * scale + bias;
}

// Returns the gradient of x from that of z. grad_mean and dot_mean are the channel's means of the
// gradient of z and of its product with the normalised x; both are 0 where the statistics are
// constants. A dot_mean of 0 is not multiplied: for an infinite x the product would be NaN.
template <typename T>
MEMSAVE_EXT_INLINE T input_gradient(T grad, T x, T mean, T invstd, T scale, T grad_mean,
                                    T dot_mean) {
  const T product = dot_mean == T{} ? T{} : (x - mean) * invstd * dot_mean;
  return scale * (grad - grad_mean - product);
}

}  // namespace memsave_ext::batch_norm
