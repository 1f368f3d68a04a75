// The kernels on CUDA. A warp reduces a token's logits, or a block where they are many; a warp
// replaces a piece of them. Logits are read in aligned vectors of 16 bytes, several in flight for
// each thread, and the few before and after them one by one.
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <type_traits>

#include "loss_head/kernels.h"
#include "vector/cuda.cuh"
#include "vector/launch.cuh"

namespace memsave_ext::loss_head {
namespace {

constexpr int kThreads = 256;
constexpr int kWarp = 32;
constexpr int kWarps = kThreads / kWarp;
constexpr int kOfWarp = kWarp * 8;       // vectors of a piece
constexpr int kMostOfWarp = kWarp * 16;  // more vectors of a token are reduced by a block

// Blocks that a multiprocessor must have room for.
template <typename Storage>
constexpr int kBlocks = sizeof(Storage) == 8 ? 2 : 4;

template <typename T>
__device__ __forceinline__ T lowest() {
  return static_cast<T>(-INFINITY);
}

// The exponential, and the hyperbolic tangent, for logits of a type. Those of 16 bits have a
// rounding of 2^-9 or 2^-12, beside which errors of 2^-23 times the argument do not count.
template <typename Storage>
struct Functions {
  static __device__ __forceinline__ Storage exp(Storage x) { return std::exp(x); }
  static __device__ __forceinline__ Storage tanh(Storage x) { return std::tanh(x); }
};

struct ApproximateFunctions {
  static __device__ __forceinline__ float exp(float x) { return power_of_2(1.44269504f * x); }
  static __device__ __forceinline__ float tanh(float x) {
    return 1 - __fdividef(2.0f, 1 + power_of_2(2.88539008f * x));
  }

 private:
  static __device__ __forceinline__ float power_of_2(float x) {
#ifdef __CUDACC__
    float power;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(x));
    return power;
#else
    return std::exp2(x);
#endif
  }
};
template <>
struct Functions<__half> : ApproximateFunctions {};
template <>
struct Functions<__nv_bfloat16> : ApproximateFunctions {};

// A token's logits in the chunk. caps: with a softcap. mixes: Chunk::mixes().
template <typename Storage, bool caps, bool mixes>
struct Row {
  using T = vector::ValueOf<Storage>;
  static constexpr bool kMixes = mixes;
  // Vectors that a thread waits for at once. One, where there are probabilities to wait for, too,
  // and where doubles would take too many registers.
  static constexpr int kUnroll = mixes || sizeof(Storage) == 8 ? 1 : 2;
  static constexpr int kSize = 16 / static_cast<int>(sizeof(Storage));
  using Vec = vector::Vector<Storage, kSize>;

  Storage* logits;
  const T* probabilities;
  const T* class_weight;
  int64_t target;  // in the chunk; -1: it is not
  int64_t classes;
  int head;         // logits before the first vector
  int64_t vectors;  // that are whole
  T keep, spread, cap, per_cap;

  __device__ __forceinline__ Row(const Chunk& chunk, int64_t token)
      : logits(static_cast<Storage*>(chunk.logits) + token * chunk.classes),
        probabilities(static_cast<const T*>(chunk.probabilities)),
        class_weight(static_cast<const T*>(chunk.class_weight)),
        target(-1),
        classes(chunk.classes),
        keep(static_cast<T>(chunk.keep)),
        spread(static_cast<T>(chunk.spread)),
        cap(static_cast<T>(chunk.softcap)),
        per_cap(1 / cap) {
    const auto past = static_cast<int>(reinterpret_cast<uintptr_t>(logits) % sizeof(Vec));
    head = past == 0 ? 0 : kSize - past / static_cast<int>(sizeof(Storage));
    if (head > classes) head = static_cast<int>(classes);
    vectors = (classes - head) / kSize;
    if (probabilities != nullptr) {
      probabilities += token * classes;
      return;
    }
    const int64_t place = chunk.target[token] - chunk.first;
    if (place >= 0 && place < classes) target = place;
  }

  __device__ __forceinline__ int64_t first_of(int64_t vector) const {
    return head + vector * kSize;
  }
  __device__ __forceinline__ Vec* at(int64_t vector) const {
    return reinterpret_cast<Vec*>(logits + first_of(vector));
  }

  // Some vectors from i on, each `distance` after the one before.
  template <int count>
  struct Vectors {
    Vec vec[count];
    __device__ __forceinline__ Vectors(const Row& row, int64_t i, int distance) {
#pragma unroll
      for (int u = 0; u < count; ++u) vec[u] = *row.at(i + u * distance);
    }
  };

  // Returns the logit that is in no vector and thread `i` of a warp's; `classes` where there is
  // none.
  __device__ __forceinline__ int64_t single(int i) const {
    static_assert(2 * (kSize - 1) <= kWarp);
    const int64_t place = i < head ? i : first_of(vectors) + i - head;
    return place < classes ? place : classes;
  }

  // The logit over its cap; without one the logit itself.
  __device__ __forceinline__ T bounded(T logit) const {
    if constexpr (!caps)
      return logit;
    else
      return Functions<Storage>::tanh(sizeof(Storage) == 2 ? logit * per_cap : logit / cap);
  }
  __device__ __forceinline__ T capped(T bounded) const {
    if constexpr (caps) return bounded * cap;
    return bounded;
  }
  __device__ __forceinline__ T weight(int64_t i) const {
    return class_weight != nullptr ? class_weight[i] : T{1};
  }
  // What a class has of the distribution beside that of the target alone.
  __device__ __forceinline__ T mixed(int64_t i) const {
    return (probabilities != nullptr ? spread + keep * probabilities[i] : spread) * weight(i);
  }
};

// Calls each(count, i) for what begins at i of a row's vectors from `from` to `end`, of which a
// thread has every `distance`th: `unroll` of them, and one by one what is left.
template <int unroll, typename Each>
__device__ __forceinline__ void for_vectors(int64_t from, int64_t end, int distance,
                                            const Each& each) {
  int64_t i = from;
  for (; i + (unroll - 1) * distance < end; i += unroll * distance) {
    each(std::integral_constant<int, unroll>{}, i);
  }
#pragma unroll 1
  for (; i < end; i += distance) each(std::integral_constant<int, 1>{}, i);
}

template <typename T>
__device__ __forceinline__ T not_farther(T distance) {
  return std::fmax(distance, static_cast<T>(kFarthest));
}

// The largest of some logits, the sum of the exponentials of their distances to it, the sum of
// their products with the distribution, and with entropy that of the exponentials' with the
// distances.
template <typename Storage, bool entropy>
struct Reduced {
  using T = vector::ValueOf<Storage>;
  T maximum = lowest<T>(), sum = 0, dot = 0, moment = 0;

  // Makes `larger` the maximum. A logit that is infinite makes the sum NaN.
  __device__ __forceinline__ T raise(T larger) {
    const T base = larger == lowest<T>() ? T{0} : larger;
    const T moved = maximum - base, power = Functions<Storage>::exp(moved);
    if constexpr (entropy) moment = (moment + sum * not_farther(moved)) * power;
    sum *= power;
    maximum = larger;
    return base;
  }

  // Adds the logits of a row from i on.
  template <typename Row, int size>
  __device__ __forceinline__ void add(const Row& row, int64_t i, const T (&logits)[size]) {
    T larger = maximum;
#pragma unroll
    for (int k = 0; k < size; ++k) larger = std::fmax(larger, logits[k]);  // without NaN
    const T base = raise(larger);
#pragma unroll
    for (int k = 0; k < size; ++k) {
      const T distance = logits[k] - base, power = Functions<Storage>::exp(distance);
      sum += power;
      if constexpr (entropy) moment += power * not_farther(distance);
    }
    if constexpr (Row::kMixes) {
#pragma unroll
      for (int k = 0; k < size; ++k) dot += row.mixed(i + k) * logits[k];
    }
  }
};

// Returns to all lanes the same bits.
template <typename Storage, bool entropy>
__device__ __forceinline__ Reduced<Storage, entropy> reduce_warp(Reduced<Storage, entropy> value) {
  auto larger = value.maximum;
#pragma unroll
  for (int distance = kWarp / 2; distance > 0; distance /= 2) {
    larger = std::fmax(larger, __shfl_xor_sync(~0u, larger, distance));
  }
  value.raise(larger);
#pragma unroll
  for (int distance = kWarp / 2; distance > 0; distance /= 2) {
    value.sum += __shfl_xor_sync(~0u, value.sum, distance);
    value.dot += __shfl_xor_sync(~0u, value.dot, distance);
    if constexpr (entropy) value.moment += __shfl_xor_sync(~0u, value.moment, distance);
  }
  return value;
}

// warps: of a token; 1, or all of a block.
template <typename Storage, bool caps, bool mixes, bool entropy>
__global__ void __launch_bounds__(kThreads, kBlocks<Storage>)
    reduce_kernel(const __grid_constant__ Chunk chunk, void* sums, int warps) {
  using R = Row<Storage, caps, mixes>;
  using T = typename R::T;
  __shared__ T of_warps[3 + entropy][kWarps];
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const bool alone = warps == 1;
  const int64_t token = alone ? int64_t{blockIdx.x} * kWarps + warp : blockIdx.x;
  if (token >= chunk.tokens) return;  // alone: there is no barrier
  const R row(chunk, token);
  const int thread = alone ? lane : threadIdx.x, threads = warps * kWarp;
  T* const to = static_cast<T*>(sums) + token;
  Reduced<Storage, entropy> value;
  // That of the logits before: read here, beside the first of these.
  if (thread == 0) {
    value = {to[0], to[chunk.tokens], to[2 * chunk.tokens]};
    if constexpr (entropy) value.moment = to[3 * chunk.tokens];
  }
  for_vectors<R::kUnroll>(thread, row.vectors, threads, [&](auto unroll, int64_t i) {
    const typename R::template Vectors<unroll> x(row, i, threads);
#pragma unroll
    for (int u = 0; u < unroll; ++u) {
      T logits[R::kSize];
#pragma unroll
      for (int k = 0; k < R::kSize; ++k) logits[k] = row.capped(row.bounded(x.vec[u][k]));
      value.add(row, row.first_of(i + u * threads), logits);
    }
  });
  const auto add_one = [&](int64_t i, bool all) {
    const T logits[1] = {row.capped(row.bounded(vector::widen(row.logits[i])))};
    if (all)
      value.add(row, i, logits);
    else
      value.dot += row.keep * row.weight(i) * logits[0];
  };
  if (thread < kWarp) {
    const int64_t i = row.single(thread);
    if (i < row.classes) add_one(i, true);
    if (thread == 0 && row.target >= 0) add_one(row.target, false);
  }
  value = reduce_warp(value);
  if (!alone) {
    if (lane == 0) {
      of_warps[0][warp] = value.maximum;
      of_warps[1][warp] = value.sum;
      of_warps[2][warp] = value.dot;
      if constexpr (entropy) of_warps[3][warp] = value.moment;
    }
    __syncthreads();
    if (warp != 0) return;
    value = {};
    if (lane < kWarps) {
      value = {of_warps[0][lane], of_warps[1][lane], of_warps[2][lane]};
      if constexpr (entropy) value.moment = of_warps[3][lane];
    }
    value = reduce_warp(value);
  }
  if (lane != 0) return;
  to[0] = value.maximum;
  to[chunk.tokens] = value.sum;
  to[2 * chunk.tokens] = value.dot;
  if constexpr (entropy) to[3 * chunk.tokens] = value.moment;
}

// What the gradient of a token's logits is made of.
template <typename Storage, bool caps, bool mixes, bool entropy>
struct Gradient {
  using R = Row<Storage, caps, mixes>;
  using T = typename R::T;
  T maximum, log_sum, of_softmax, of_target, of_entropy = 0;

  __device__ __forceinline__ Gradient(const Chunk& chunk, const void* coefficients, int64_t token) {
    const T* const first = static_cast<const T*>(coefficients) + token;
    maximum = first[0];
    log_sum = first[chunk.tokens];
    of_softmax = first[2 * chunk.tokens];
    of_target = first[3 * chunk.tokens];
    if constexpr (entropy) of_entropy = first[4 * chunk.tokens];
  }

  // Replaces the logits of a row from i on by their gradients: zeros where the token does not
  // count.
  template <int size>
  __device__ __forceinline__ void replace(const R& row, int64_t i, T (&values)[size]) const {
    if (of_softmax == 0 && of_target == 0 && of_entropy == 0) {
#pragma unroll
      for (int k = 0; k < size; ++k) values[k] = 0;
      return;
    }
    T bounded[size];
#pragma unroll
    for (int k = 0; k < size; ++k) {
      bounded[k] = row.bounded(values[k]);
      const T distance = row.capped(bounded[k]) - maximum - log_sum;
      T factor = of_softmax;
      if constexpr (entropy) factor += of_entropy * not_farther(distance);
      values[k] = factor * Functions<Storage>::exp(distance);
      if constexpr (mixes) values[k] -= row.mixed(i + k) * of_target;
    }
    if (row.target >= i && row.target < i + size) {
      const T part = row.keep * row.weight(row.target) * of_target;
#pragma unroll
      for (int k = 0; k < size; ++k) {
        if (row.target == i + k) values[k] -= part;
      }
    }
    if constexpr (caps) {
#pragma unroll
      for (int k = 0; k < size; ++k) values[k] *= 1 - bounded[k] * bounded[k];
    }
  }
};

// pieces: of a token's vectors. The warps of a block have the same piece of consecutive tokens.
template <typename Storage, bool caps, bool mixes, bool entropy>
__global__ void __launch_bounds__(kThreads, kBlocks<Storage>)
    gradient_kernel(const __grid_constant__ Chunk chunk, const void* coefficients,
                    uint32_t pieces) {
  using R = Row<Storage, caps, mixes>;
  using T = typename R::T;
  const int lane = threadIdx.x % kWarp;
  const int64_t token = int64_t{blockIdx.x / pieces} * kWarps + threadIdx.x / kWarp;
  const int64_t piece = blockIdx.x % pieces;
  if (token >= chunk.tokens) return;
  const R row(chunk, token);
  const Gradient<Storage, caps, mixes, entropy> gradient(chunk, coefficients, token);
  const int64_t end = std::min<int64_t>((piece + 1) * kOfWarp, row.vectors);
  for_vectors<R::kUnroll>(piece * kOfWarp + lane, end, kWarp, [&](auto unroll, int64_t i) {
    const typename R::template Vectors<unroll> x(row, i, kWarp);
#pragma unroll
    for (int u = 0; u < unroll; ++u) {
      T values[R::kSize];
#pragma unroll
      for (int k = 0; k < R::kSize; ++k) values[k] = x.vec[u][k];
      gradient.replace(row, row.first_of(i + u * kWarp), values);
      *row.at(i + u * kWarp) = R::Vec::from(values);
    }
  });
  const int64_t i = row.single(lane);
  if (piece == 0 && i < row.classes) {
    T values[1] = {vector::widen(row.logits[i])};
    gradient.replace(row, i, values);
    row.logits[i] = vector::narrow<Storage>(values[0]);
  }
}

// Calls a function with the logits' type, and those of with_kind().
template <typename Function>
void with_types(const Chunk& chunk, const Function& function) {
  with_kind(chunk, [&](auto caps, auto mixes, auto entropy) {
    switch (chunk.dtype) {
      case DType::kDouble:
        return function(double{}, caps, mixes, entropy);
      case DType::kFloat:
        return function(float{}, caps, mixes, entropy);
      case DType::kHalf:
        return function(__half{}, caps, mixes, entropy);
      case DType::kBFloat16:
        return function(__nv_bfloat16{}, caps, mixes, entropy);
    }
  });
}

int64_t vectors_of(const Chunk& chunk) { return chunk.classes * item_size(chunk.dtype) / 16; }

void launch_reduce(const Chunk& chunk, void* sums, void* stream) {
  // By the classes alone, so that a token's sums do not depend on how many tokens there are.
  const int warps = vectors_of(chunk) > kMostOfWarp ? kWarps : 1;
  const int64_t blocks = warps == 1 ? (chunk.tokens + kWarps - 1) / kWarps : chunk.tokens;
  with_types(chunk, [&](auto storage, auto caps, auto mixes, auto entropy) {
    launch(reduce_kernel<decltype(storage), caps, mixes, entropy>, blocks, kThreads, 0, stream,
           chunk, sums, warps);
  });
}

void launch_gradient(const Chunk& chunk, const void* coefficients, void* stream) {
  const auto pieces = static_cast<uint32_t>(vectors_of(chunk) / kOfWarp + 1);
  const int64_t blocks = (chunk.tokens + kWarps - 1) / kWarps * pieces;
  with_types(chunk, [&](auto storage, auto caps, auto mixes, auto entropy) {
    launch(gradient_kernel<decltype(storage), caps, mixes, entropy>, blocks, kThreads, 0, stream,
           chunk, coefficients, pieces);
  });
}

}  // namespace

const Kernels cuda_kernels = {launch_reduce, launch_gradient};

}  // namespace memsave_ext::loss_head
