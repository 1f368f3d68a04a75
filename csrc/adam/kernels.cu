// Steps on CUDA: the tensors of one combination of types by one launch, each block on a chunk of
// one of them.
#include <cuda_runtime.h>

#include <stdexcept>
#include <string>

#include "adam/batch.cuh"
#include "vector/cuda.cuh"

namespace memsave_ext::adam {
namespace {

using vector::ValueOf;

constexpr int kThreads = 256;

// The values of IEEE, whatever flags compile them.
struct Math {
  static __device__ __forceinline__ float product(float a, float b) { return __fmul_rn(a, b); }
  static __device__ __forceinline__ double product(double a, double b) { return __dmul_rn(a, b); }
  static __device__ __forceinline__ float fused(float a, float b, float c) {
    return __fmaf_rn(a, b, c);
  }
  static __device__ __forceinline__ double fused(double a, double b, double c) {
    return __fma_rn(a, b, c);
  }
  static __device__ __forceinline__ float square_root(float x) { return __fsqrt_rn(x); }
  static __device__ __forceinline__ double square_root(double x) { return __dsqrt_rn(x); }

  template <typename T>
  static __device__ __forceinline__ T maximum(T a, T b) {
    return a != a || a > b ? a : b;
  }
};

template <typename Value>
struct Rounded {
  __device__ __forceinline__ Value operator()(double value) const {
    return static_cast<Value>(value);
  }
};

__device__ __forceinline__ Coefficients<double> coefficients_of(const Recipe& recipe,
                                                                const float* device_step) {
  const Options& options = recipe.options;
  const double lr = recipe.device_lr != nullptr ? *recipe.device_lr : options.lr;
  return coefficients(options, lr,
                      device_step != nullptr ? powers(options, *device_step) : recipe.powers);
}

// A vector whose words of at least 4 bytes are updated in place, one after the other: as all new
// values would not fit into registers beside the old ones.
template <typename T, int size, int word>
struct alignas(sizeof(T) * size) Words {
  using Word = vector::Vector<T, word>;
  Word words[size / word];
};

// The block's part of a tensor, in vectors of `size` elements; from and to are elements.
template <int size, typename Param, typename State, bool amsgrad>
__device__ __forceinline__ void step_vectors(const BatchedTensor& tensor, int64_t from, int64_t to,
                                             const Coefficients<ValueOf<Param>>& c) {
  using Value = ValueOf<Param>;
  constexpr int kWord = sizeof(Param) == 2 && size > 1 ? 2 : 1;  // elements
  using Params = Words<Param, size, kWord>;
  using States = Words<State, size, kWord>;
#pragma unroll 1
  for (int64_t i = from / size + threadIdx.x; i < to / size; i += kThreads) {
    auto param = vector::load<Params>(tensor.param, i);
    const auto grad = vector::load<Params>(tensor.grad, i);
    auto exp_avg = vector::load<States>(tensor.exp_avg, i);
    auto exp_avg_sq = vector::load<States>(tensor.exp_avg_sq, i);
    States max_exp_avg_sq;
    if constexpr (amsgrad) max_exp_avg_sq = vector::load<States>(tensor.max_exp_avg_sq, i);
#pragma unroll
    for (int w = 0; w < size / kWord; ++w) {
      Value params[kWord], first[kWord], second[kWord], largest[kWord];
#pragma unroll
      for (int k = 0; k < kWord; ++k) {
        Values<Value> x = {param.words[w][k], exp_avg.words[w][k], exp_avg_sq.words[w][k]};
        if constexpr (amsgrad) x.max_exp_avg_sq = max_exp_avg_sq.words[w][k];
        update<Math, amsgrad>(c, grad.words[w][k], x);
        params[k] = x.param;
        first[k] = x.exp_avg;
        second[k] = x.exp_avg_sq;
        largest[k] = x.max_exp_avg_sq;
      }
      param.words[w] = Params::Word::from(params);
      exp_avg.words[w] = States::Word::from(first);
      exp_avg_sq.words[w] = States::Word::from(second);
      if constexpr (amsgrad) max_exp_avg_sq.words[w] = States::Word::from(largest);
    }
    vector::store(tensor.param, i, param);
    vector::store(tensor.exp_avg, i, exp_avg);
    vector::store(tensor.exp_avg_sq, i, exp_avg_sq);
    if constexpr (amsgrad) vector::store(tensor.max_exp_avg_sq, i, max_exp_avg_sq);
  }
}

// Whether vectors of `size` elements may be loaded.
template <int size, typename Param, typename State>
__device__ __forceinline__ bool is_aligned(const BatchedTensor& tensor) {
  const auto address = [](const void* pointer) { return reinterpret_cast<uintptr_t>(pointer); };
  const uintptr_t params = address(tensor.param) | address(tensor.grad);
  const uintptr_t states =
      address(tensor.exp_avg) | address(tensor.exp_avg_sq) | address(tensor.max_exp_avg_sq);
  return params % (size * sizeof(Param)) == 0 && states % (size * sizeof(State)) == 0;
}

template <typename Param, typename State, bool amsgrad>
__global__ void __launch_bounds__(kThreads) step_kernel(const __grid_constant__ Batch batch) {
  using Value = ValueOf<Param>;
  constexpr int kSize = 16 / sizeof(State);  // loads of 16 bytes
  static_assert(kShortestChunk % kSize == 0);
  const Chunk chunk = find_chunk(batch.tensors, batch.tensor_count, batch.chunk_length, blockIdx.x);
  const BatchedTensor& tensor = batch.tensors[chunk.tensor];
  __shared__ Coefficients<Value> shared;
  if (threadIdx.x == 0) {
    shared = convert<Value>(coefficients_of(batch.recipes[tensor.recipe], tensor.device_step),
                            Rounded<Value>{});
  }
  __syncthreads();
  const Coefficients<Value> c = shared;
  const int64_t end = chunk.begin + chunk.count;
  const int64_t last = is_aligned<kSize, Param, State>(tensor) ? end / kSize * kSize : chunk.begin;
  step_vectors<kSize, Param, State, amsgrad>(tensor, chunk.begin, last, c);
  step_vectors<1, Param, State, amsgrad>(tensor, last, end, c);
}

struct Steps {
  static constexpr int kCount = 500;

  float* of[kCount];
  int count;
};

static_assert(sizeof(Steps) <= 4096, "what every device takes as a kernel's arguments");

__global__ void __launch_bounds__(kThreads) advance_kernel(const __grid_constant__ Steps steps) {
  const int i = blockIdx.x * kThreads + threadIdx.x;
  if (i < steps.count) *steps.of[i] += 1;
}

template <typename Arguments>
void launch(void (*kernel)(Arguments), const Arguments& arguments, uint32_t blocks, void* stream) {
  kernel<<<blocks, kThreads, 0, static_cast<cudaStream_t>(stream)>>>(arguments);
  if (const cudaError_t status = cudaGetLastError(); status != cudaSuccess) {
    throw std::runtime_error(std::string("memsave_ext: adam: ") + cudaGetErrorString(status));
  }
}

using Kernel = void (*)(Batch);

#define MEMSAVE_EXT_STEPS(Param, State) \
  {step_kernel<Param, State, false>, step_kernel<Param, State, true>}
// [DType of the parameter][whether the states are float][amsgrad], in one dimension.
constexpr int kKernels = 16;
const Kernel kSteps[kKernels / 4][2][2] = {
    {MEMSAVE_EXT_STEPS(double, double), {}},
    {{}, MEMSAVE_EXT_STEPS(float, float)},
    {MEMSAVE_EXT_STEPS(__half, __half), MEMSAVE_EXT_STEPS(__half, float)},
    {MEMSAVE_EXT_STEPS(__nv_bfloat16, __nv_bfloat16), MEMSAVE_EXT_STEPS(__nv_bfloat16, float)}};
#undef MEMSAVE_EXT_STEPS

// Of its kernel in the table.
int index_of(const Item& item) {
  const bool float_states = item.state_type == DType::kFloat;
  return static_cast<int>(item.param_type) * 4 + float_states * 2 +
         (item.max_exp_avg_sq != nullptr);
}

void launch_steps(const Item* items, int64_t count, void* stream) {
  uint32_t present = 0;
  for (int64_t i = 0; i < count; ++i) present |= 1u << index_of(items[i]);
  for (int index = 0; index < kKernels; ++index) {
    if ((present >> index & 1) == 0) continue;
    const auto launch_batch = [&](const Batch& batch, uint32_t chunks) {
      launch(kSteps[index / 4][index / 2 % 2][index % 2], batch, chunks, stream);
    };
    Batcher batcher(launch_batch);
    for (int64_t i = 0; i < count; ++i) {
      if (index_of(items[i]) == index) batcher.add(items[i]);
    }
    batcher.finish();
  }
}

void launch_advance(float* const* steps, int64_t count, void* stream) {
  for (int64_t first = 0; first < count; first += Steps::kCount) {
    Steps some;
    some.count = static_cast<int>(count - first < Steps::kCount ? count - first : Steps::kCount);
    for (int i = 0; i < some.count; ++i) some.of[i] = steps[first + i];
    launch(advance_kernel, some, (some.count + kThreads - 1) / kThreads, stream);
  }
}

}  // namespace

const Kernels cuda_kernels = {launch_steps, launch_advance};

}  // namespace memsave_ext::adam
