// Sums of squares of gradients: one launch sums chunks, the next adds up the chunks of each tensor.
// There are no atomics, and all chunks have one length: the sum depends on the gradient alone.
//
// Many devices have a 64th as many units for double as for float. So a thread adds up squares of
// floats in pairs of floats, and turns these into a double once; where squares are too large or too
// small for floats, it adds them up again in double.
#include <cfloat>
#include <type_traits>

#include "adam/cuda/launch.cuh"
#include "vector/cuda.cuh"

namespace memsave_ext::adam {
namespace {

constexpr int64_t kChunk = 16384;
constexpr int kWarp = 32;

struct MeasuredTensor {
  const void* grad;
  int64_t numel;  // 0 where there is no gradient
  uint32_t first_chunk;
  DType type;
};

struct MeasuredBatch {
  static constexpr int kTensors = 160;

  Measure measure;
  int64_t first;  // index of the first tensor's item
  int count;
  MeasuredTensor tensors[kTensors];
};

static_assert(sizeof(MeasuredBatch) <= 4096, "what every device takes as a kernel's arguments");

template <typename T, int length>
struct alignas(sizeof(T) * length) Elements {
  using Element = T;
  vector::Vector<T, length> values;
};

// Returns the sum over the threads of the block, to its first warp.
__device__ __forceinline__ double sum_block(double sum) {
  // Halved until a warp is left, which takes fewer sums than each warp's own.
  __shared__ double sums[kThreads];
  const int thread = static_cast<int>(threadIdx.x);
  sums[thread] = sum;
  __syncthreads();
#pragma unroll
  for (int half = kThreads / 2; half >= kWarp; half /= 2) {
    if (thread < half) sums[thread] += sums[thread + half];
    __syncthreads();
  }
  if (thread >= kWarp) return 0;
  sum = sums[thread];
#pragma unroll
  for (int distance = kWarp / 2; distance > 0; distance /= 2) {
    sum += __shfl_xor_sync(~0u, sum, distance);
  }
  return sum;
}

// A sum of numbers of at least 0: high + low. What is rounded off `high` goes into `low`, so that
// n of them are rounded by at most (n + 1) (n + 2) 2^-48 of their sum.
struct Pair {
  float high = 0, low = 0;

  __device__ __forceinline__ void add(float value) { low = __fadd_rn(low, add_high(value)); }

  // Adds value + rest, where rest is small beside value.
  __device__ __forceinline__ void add(float value, float rest) {
    low = __fadd_rn(low, __fadd_rn(add_high(value), rest));
  }

 private:
  // Returns what is rounded.
  __device__ __forceinline__ float add_high(float value) {
    const float sum = __fadd_rn(high, value);
    const float error = __fsub_rn(fminf(high, value), __fsub_rn(sum, fmaxf(high, value)));
    high = sum;
    return error;
  }
};

// Chunks of fewer elements are summed in double. In longer ones a pair gets one of 1024 squares or
// less, so that all roundings together stay below 2^-53 for each element, as in double.
constexpr int kFewest = 4096;

// What squares of floats lose to underflow, 2^-149 each, is below 2^-58 of a sum of this size.
constexpr float kSmallest = 0x1p-90f;

// Calls use(vector) for each vector of this thread's share of a chunk, at most 64 elements.
template <typename Vec, int unrolled, typename Use>
__device__ __forceinline__ void for_vectors(const void* grad, int64_t begin, int count,
                                            const Use& use) {
  constexpr int kSize = sizeof(Vec) / sizeof(typename Vec::Element);
  const bool aligned = reinterpret_cast<uintptr_t>(grad) % sizeof(Vec) == 0;
  const int whole = aligned ? count / kSize : 0;
#pragma unroll unrolled
  for (int i = threadIdx.x; i < whole; i += kThreads) {
    use(vector::load<Vec>(grad, begin / kSize + i));
  }
  // Each thread gets the same elements whether they are aligned or not: the sum stays the same.
  const int from = whole - whole % kThreads + threadIdx.x;
  for (int i = from < whole ? from + kThreads : from; i * kSize < count; i += kThreads) {
    use(vector::load<Vec>(grad, vector::Part{begin + i * kSize, count - i * kSize}));
  }
}

// Sets `sum` to this thread's sum of squares of a chunk. Returns false where pairs cannot hold it.
template <typename T>
__device__ __forceinline__ bool sum_in_pairs(const void* grad, int64_t begin, int count,
                                             double& sum) {
  constexpr int kSize = 16 / sizeof(T);
  constexpr uint32_t kNotSigns = sizeof(T) == 2 ? 0x7fff7fff : 0x7fffffff;
  using Vec = Elements<T, kSize>;
  Pair sums[kSize];
  uint32_t bits = 0;
  for_vectors<Vec, 4>(grad, begin, count, [&](const Vec& x) {
    uint32_t words[4];
    memcpy(words, &x, sizeof(words));
    bits |= words[0] | words[1] | words[2] | words[3];
#pragma unroll
    for (int k = 0; k < kSize; ++k) {
      const float value = x.values[k];
      const float square = __fmul_rn(value, value);
      if constexpr (sizeof(T) == 2) {  // exact
        sums[k].add(square);
      } else {
        sums[k].add(square, __fmaf_rn(value, value, -square));
      }
    }
  });
#pragma unroll
  for (int k = 1; k < kSize; ++k) sums[0].add(sums[k].high, sums[k].low);
  sum = static_cast<double>(sums[0].high) + static_cast<double>(sums[0].low);
  const bool all_zero = (bits & kNotSigns) == 0;
  return all_zero || (sums[0].high >= kSmallest && sums[0].high <= FLT_MAX);
}

// Returns the sum of squares of a chunk, to the first warp; -infinity where it overflows though all
// values are finite, which only doubles can.
template <typename T>
__device__ __forceinline__ double sum_squares(const void* grad, int64_t begin, int count) {
  constexpr int kSize = 16 / sizeof(T);
  constexpr bool wide = std::is_same_v<T, double>;
  using Vec = Elements<T, kSize>;
  double sum = 0;
  bool summed = false, finite = true;
  if constexpr (!wide) summed = count >= kFewest && sum_in_pairs<T>(grad, begin, count, sum);
  if (!summed) {
    double sums[kSize] = {};
    for_vectors<Vec, wide ? 4 : 1>(grad, begin, count, [&](const Vec& x) {
#pragma unroll
      for (int k = 0; k < kSize; ++k) {
        const double value = x.values[k];
        if constexpr (wide) finite = finite && isfinite(value);
        sums[k] = fma(value, value, sums[k]);
      }
    });
#pragma unroll
    for (int k = 1; k < kSize; ++k) sums[0] += sums[k];
    sum = sums[0];
  }
  sum = sum_block(sum);
  if constexpr (wide) {
    if (__syncthreads_and(finite) && isinf(sum)) return -sum;
  }
  return sum;
}

// dtype: the first that may be the gradient's; those before it are ruled out.
template <DType dtype>
__device__ __forceinline__ double sum_squares_of(DType type, const void* grad, int64_t begin,
                                                 int count) {
  constexpr auto next = static_cast<DType>(static_cast<int>(dtype) + 1);
  if constexpr (static_cast<int>(next) < vector::kDTypes) {
    if (type != dtype) return sum_squares_of<next>(type, grad, begin, count);
  }
  return sum_squares<vector::DeviceStorageOf<dtype>>(grad, begin, count);
}

// That a multiprocessor must have room for; 0: any number.
constexpr int kSumBlocks = vector::kIsBlackwell ? 5 : 0;

__global__ void __launch_bounds__(kThreads, kSumBlocks)
    sum_kernel(const __grid_constant__ MeasuredBatch batch, double* partials) {
  const Chunk chunk = find_chunk(batch.tensors, batch.count, kChunk, blockIdx.x);
  const MeasuredTensor& tensor = batch.tensors[chunk.tensor];
  const double sum = sum_squares_of<DType{0}>(tensor.type, tensor.grad, chunk.begin, chunk.count);
  if (threadIdx.x == 0) partials[blockIdx.x] = sum;
}

__global__ void __launch_bounds__(kThreads)
    finish_kernel(const __grid_constant__ MeasuredBatch batch, const double* partials) {
  const MeasuredTensor& tensor = batch.tensors[blockIdx.x];
  const int64_t chunks = chunks_of(tensor.numel, kChunk);
  double sum = 0;
  bool finite = true;
  for (int64_t i = threadIdx.x; i < chunks; i += kThreads) {
    const double partial = partials[tensor.first_chunk + i];
    finite = finite && (isfinite(partial) || partial < 0);
    sum += fabs(partial);
  }
  sum = sum_block(sum);
  finite = __syncthreads_and(finite);
  if (threadIdx.x != 0) return;
  const Measure& to = batch.measure;
  const int64_t item = batch.first + blockIdx.x;
  if (to.squares != nullptr) to.squares[item] = sum;
  if (to.factors != nullptr) {
    const double scale = to.grad_scale != nullptr ? *to.grad_scale : 1;
    double factor = 1 / scale;
    if (to.max_norm != 0) factor *= clip_factor(sqrt(sum) / scale, to.max_norm);
    to.factors[item] = factor;
  }
  if (to.skips != nullptr) to.skips[item] = finite ? 0 : 1;
  if (to.found_inf != nullptr && !finite) *to.found_inf = 1;
}

// Calls launch(batch, chunks) for each batch of the items, in turn.
template <typename Launch>
void for_batches(const Item* items, int64_t count, const Measure& measure, const Launch& launch) {
  for (int64_t first = 0; first < count; first += MeasuredBatch::kTensors) {
    MeasuredBatch batch;
    batch.measure = measure;
    batch.first = first;
    batch.count = 0;
    uint32_t chunks = 0;
    for (int64_t i = first; i < count && batch.count < MeasuredBatch::kTensors; ++i) {
      const Item& item = items[i];
      batch.tensors[batch.count++] = {item.grad, item.numel, chunks, item.param_type};
      chunks += static_cast<uint32_t>(chunks_of(item.numel, kChunk));
    }
    launch(batch, chunks);
  }
}

}  // namespace

void launch_measure(const Item* items, int64_t count, const Measure& measure, void* workspace,
                    void* stream) {
  auto* const partials = static_cast<double*>(workspace);
  for_batches(items, count, measure, [&](const MeasuredBatch& batch, uint32_t chunks) {
    launch(sum_kernel, chunks, kThreads, 0, stream, batch, partials);
    launch(finish_kernel, batch.count, kThreads, 0, stream, batch, partials);
  });
}

// Returns the bytes that the largest batch needs. All batches share them: their kernels run one
// after the other.
int64_t measure_workspace(const Item* items, int64_t count) {
  int64_t bytes = 0;
  for_batches(items, count, {}, [&](const MeasuredBatch&, uint32_t chunks) {
    const int64_t of_batch = static_cast<int64_t>(sizeof(double)) * chunks;
    if (of_batch > bytes) bytes = of_batch;
  });
  return bytes;
}

}  // namespace memsave_ext::adam
