// The kernels on CUDA. A block reduces a token's logits; threads replace a few logits each.
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>

#include "loss_head/kernels.h"
#include "vector/cuda.cuh"
#include "vector/launch.cuh"

namespace memsave_ext::loss_head {
namespace {

constexpr int kThreads = 256;
constexpr int kWarp = 32;
constexpr int kPerThread = 4;  // logits that a thread replaces

template <typename T>
__device__ __forceinline__ T lowest() {
  return static_cast<T>(-INFINITY);
}

// A token's logits in the chunk. caps: with a softcap. mixes: Chunk::mixes().
template <typename Storage, bool caps, bool mixes>
struct Row {
  using T = vector::ValueOf<Storage>;

  Storage* logits;
  const T* probabilities;
  const T* class_weight;
  int64_t target;  // in the chunk; -1: it is not
  T keep, spread, cap;

  __device__ __forceinline__ Row(const Chunk& chunk, int64_t token)
      : logits(static_cast<Storage*>(chunk.logits) + token * chunk.classes),
        probabilities(static_cast<const T*>(chunk.probabilities)),
        class_weight(static_cast<const T*>(chunk.class_weight)),
        target(-1),
        keep(static_cast<T>(chunk.keep)),
        spread(static_cast<T>(chunk.spread)),
        cap(static_cast<T>(chunk.softcap)) {
    if (probabilities != nullptr) {
      probabilities += token * chunk.classes;
      return;
    }
    const int64_t place = chunk.target[token] - chunk.first;
    if (place >= 0 && place < chunk.classes) target = place;
  }

  // The logit over its cap; without one the logit itself.
  __device__ __forceinline__ T bounded(int64_t i) const {
    const T logit = vector::widen(logits[i]);
    if constexpr (caps) return std::tanh(logit / cap);
    return logit;
  }
  __device__ __forceinline__ T capped(T bounded) const {
    if constexpr (caps) return bounded * cap;
    return bounded;
  }

  // The token's distribution at class i of the chunk times a factor; 0 where the class has no part,
  // whatever its weight and factor.
  __device__ __forceinline__ T distributed(int64_t i, T factor) const {
    const T weight = class_weight != nullptr && (mixes || i == target) ? class_weight[i] : T{1};
    T product{};
    if constexpr (mixes) {
      const T a = probabilities != nullptr ? spread + keep * probabilities[i] : spread;
      product = a * weight * factor;
    }
    return i == target ? product + keep * weight * factor : product;
  }
};

// The largest of some logits, the sum of the exponentials of their distances to it, and the sum of
// their products with the distribution.
template <typename T>
struct Reduced {
  T maximum, sum, dot;

  __device__ __forceinline__ void add(T logit) {
    if (logit > maximum) {
      sum = sum * std::exp(maximum - logit) + (1 + (logit - logit));  // NaN if it is infinite
      maximum = logit;
    } else if (logit != lowest<T>()) {
      sum += std::exp(logit - maximum);
    }
  }

  __device__ __forceinline__ Reduced with(const Reduced& other) const {
    const T larger = other.maximum > maximum ? other.maximum : maximum;
    const T base = larger == lowest<T>() ? T{0} : larger;
    return {larger, sum * std::exp(maximum - base) + other.sum * std::exp(other.maximum - base),
            dot + other.dot};
  }
};

template <typename T>
__device__ __forceinline__ Reduced<T> reduce_warp(Reduced<T> value) {
#pragma unroll
  for (int distance = kWarp / 2; distance > 0; distance /= 2) {
    const Reduced<T> other = {__shfl_xor_sync(~0u, value.maximum, distance),
                              __shfl_xor_sync(~0u, value.sum, distance),
                              __shfl_xor_sync(~0u, value.dot, distance)};
    // Both lanes take the lower one's first, and so have the same bits.
    value = (threadIdx.x & distance) == 0 ? value.with(other) : other.with(value);
  }
  return value;
}

template <typename Storage, bool caps, bool mixes>
__global__ void __launch_bounds__(kThreads)
    reduce_kernel(const __grid_constant__ Chunk chunk, void* sums) {
  using R = Row<Storage, caps, mixes>;
  using T = typename R::T;
  __shared__ T of_warps[3][kThreads / kWarp];
  const int64_t token = blockIdx.x;
  const R row(chunk, token);
  Reduced<T> value = {lowest<T>(), 0, 0};
  for (int64_t i = threadIdx.x; i < chunk.classes; i += kThreads) {
    const T logit = row.capped(row.bounded(i));
    value.add(logit);
    value.dot += row.distributed(i, logit);
  }
  value = reduce_warp(value);
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  if (lane == 0) {
    of_warps[0][warp] = value.maximum;
    of_warps[1][warp] = value.sum;
    of_warps[2][warp] = value.dot;
  }
  __syncthreads();
  if (warp != 0) return;
  const bool there = lane < kThreads / kWarp;
  value = {there ? of_warps[0][lane] : lowest<T>(), there ? of_warps[1][lane] : T{0},
           there ? of_warps[2][lane] : T{0}};
  value = reduce_warp(value);
  if (lane != 0) return;
  T* const to = static_cast<T*>(sums) + token;
  const Reduced<T> all = Reduced<T>{to[0], to[chunk.tokens], to[2 * chunk.tokens]}.with(value);
  to[0] = all.maximum;
  to[chunk.tokens] = all.sum;
  to[2 * chunk.tokens] = all.dot;
}

template <typename Storage, bool caps, bool mixes>
__global__ void __launch_bounds__(kThreads)
    gradient_kernel(const __grid_constant__ Chunk chunk, const void* coefficients,
                    int64_t blocks_of_token) {
  using R = Row<Storage, caps, mixes>;
  using T = typename R::T;
  const int64_t token = blockIdx.x / blocks_of_token;
  const int64_t block = blockIdx.x % blocks_of_token;
  const R row(chunk, token);
  const T* const of = static_cast<const T*>(coefficients) + token;
  const T maximum = of[0], log_sum = of[chunk.tokens];
  const T of_softmax = of[2 * chunk.tokens], of_target = of[3 * chunk.tokens];
  const bool counts = of_softmax != 0 || of_target != 0;
#pragma unroll
  for (int k = 0; k < kPerThread; ++k) {
    const int64_t i = (block * kPerThread + k) * kThreads + threadIdx.x;
    if (i >= chunk.classes) return;
    const T bounded = row.bounded(i);
    T gradient = of_softmax * std::exp(row.capped(bounded) - maximum - log_sum) -
                 row.distributed(i, of_target);
    if constexpr (caps) gradient *= 1 - bounded * bounded;
    row.logits[i] = vector::narrow<Storage>(counts ? gradient : T{0});
  }
}

// Calls a function with the logits' type, and those of with_kind().
template <typename Function>
void with_types(const Chunk& chunk, const Function& function) {
  with_kind(chunk, [&](auto caps, auto mixes) {
    switch (chunk.dtype) {
      case DType::kDouble:
        return function(double{}, caps, mixes);
      case DType::kFloat:
        return function(float{}, caps, mixes);
      case DType::kHalf:
        return function(__half{}, caps, mixes);
      case DType::kBFloat16:
        return function(__nv_bfloat16{}, caps, mixes);
    }
  });
}

void launch_reduce(const Chunk& chunk, void* sums, void* stream) {
  with_types(chunk, [&](auto storage, auto caps, auto mixes) {
    launch(reduce_kernel<decltype(storage), caps, mixes>, chunk.tokens, kThreads, 0, stream, chunk,
           sums);
  });
}

void launch_gradient(const Chunk& chunk, const void* coefficients, void* stream) {
  constexpr int64_t kOfBlock = kThreads * kPerThread;
  const int64_t blocks = (chunk.classes + kOfBlock - 1) / kOfBlock;
  with_types(chunk, [&](auto storage, auto caps, auto mixes) {
    launch(gradient_kernel<decltype(storage), caps, mixes>, chunk.tokens * blocks, kThreads, 0,
           stream, chunk, coefficients, blocks);
  });
}

}  // namespace

const Kernels cuda_kernels = {launch_reduce, launch_gradient};

}  // namespace memsave_ext::loss_head
