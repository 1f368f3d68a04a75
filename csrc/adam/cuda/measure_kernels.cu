// Sums of squares of gradients: one launch sums chunks, the next adds up the chunks of each tensor.
// There are no atomics, and all chunks have one length: the sum depends on the gradient alone.
//
// Squares are summed in double, so that squares of floats cannot overflow. On devices with half as
// many units for double as for float, loads take longer than that.
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

// Returns the sum over the threads of the block.
__device__ __forceinline__ double sum_block(double sum) {
  __shared__ double of_warps[kThreads / kWarp];
#pragma unroll
  for (int distance = kWarp / 2; distance > 0; distance /= 2) {
    sum += __shfl_xor_sync(~0u, sum, distance);
  }
  if (threadIdx.x % kWarp == 0) of_warps[threadIdx.x / kWarp] = sum;
  __syncthreads();
  sum = 0;
#pragma unroll
  for (int i = 0; i < kThreads / kWarp; ++i) sum += of_warps[i];
  return sum;
}

// Returns the sum of squares of a chunk; -infinity where it overflows though all values are finite,
// which only doubles can.
template <typename T>
__device__ __forceinline__ double sum_squares(const void* grad, int64_t begin, int count) {
  constexpr int kSize = 16 / sizeof(T);
  using Vec = Elements<T, kSize>;
  const bool aligned = reinterpret_cast<uintptr_t>(grad) % sizeof(Vec) == 0;
  double sums[kSize] = {};
  bool finite = true;
  const auto add = [&](const Vec& x) {
#pragma unroll
    for (int k = 0; k < kSize; ++k) {
      const double value = x.values[k];
      if constexpr (std::is_same_v<T, double>) finite = finite && isfinite(value);
      sums[k] = fma(value, value, sums[k]);
    }
  };
  const int whole = aligned ? count / kSize : 0;
#pragma unroll 4
  for (int i = threadIdx.x; i < whole; i += kThreads) {
    add(vector::load<Vec>(grad, begin / kSize + i));
  }
  // Each thread gets the same elements whether they are aligned or not: the sum stays the same.
  const int from = whole - whole % kThreads + threadIdx.x;
  for (int i = from < whole ? from + kThreads : from; i * kSize < count; i += kThreads) {
    add(vector::load<Vec>(grad, vector::Part{begin + i * kSize, count - i * kSize}));
  }
#pragma unroll
  for (int k = 1; k < kSize; ++k) sums[0] += sums[k];
  const double sum = sum_block(sums[0]);
  if constexpr (std::is_same_v<T, double>) {
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

__global__ void __launch_bounds__(kThreads)
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
      const int64_t numel = item.grad != nullptr ? item.numel : 0;
      batch.tensors[batch.count++] = {item.grad, numel, chunks, item.param_type};
      chunks += static_cast<uint32_t>(chunks_of(numel, kChunk));
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
