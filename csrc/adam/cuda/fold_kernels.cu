// Folds of micro-gradients into states of float and double.
#include "adam/cuda/formats.cuh"
#include "adam/cuda/launch.cuh"

namespace memsave_ext::adam {
namespace {

// Folds into the elements from `from` to `to`, in vectors of `size`. Of M, a Mode, only the types
// of parameter and states count.
template <typename M, bool first, int size>
__device__ __forceinline__ void fold_vectors(const BatchedTensor& tensor, int64_t from, int64_t to,
                                             Coefficients<typename M::Value> c,
                                             const Random& random) {
  using Value = typename M::Value;
  using State = States<M, size>;
  using Grad = typename Params<M, size>::Stored;
  constexpr bool kDraws = first && std::is_same_v<Value, float>;
  constexpr int kWord = State::kWord;
  c.phase = first ? StepPhase::kFirstFold : StepPhase::kFold;  // known to the compiler
#pragma unroll 1
  for (int64_t i = from / size + threadIdx.x; i < to / size; i += kThreads) {
    Grad grad{};
    if (tensor.grad != nullptr) grad = vector::load<Grad>(tensor.grad, i);
    State exp_avg, exp_avg_sq{};
    exp_avg.stored = vector::load<typename State::Stored>(tensor.exp_avg, i);
    if (first) exp_avg_sq.stored = vector::load<typename State::Stored>(tensor.exp_avg_sq, i);
    Bits<kDraws ? size : 1> drawn{};
    if constexpr (kDraws) drawn = Bits<size>::draw(random, Draw::kMoments, i);
#pragma unroll
    for (int w = 0; w < size / kWord; ++w) {
      Value averages[kWord], packed[kWord];
#pragma unroll
      for (int k = 0; k < kWord; ++k) {
        Values<Value> x = {0, exp_avg.get(w, k), exp_avg_sq.get(w, k)};
        fold<Math>(c, grad.words[w][k], x, drawn.of(w * kWord + k));
        averages[k] = x.exp_avg;
        packed[k] = x.exp_avg_sq;
      }
      exp_avg.set(w, averages, 0);
      exp_avg_sq.set(w, packed, 0);
    }
    vector::store(tensor.exp_avg, i, exp_avg.stored);
    if (first) vector::store(tensor.exp_avg_sq, i, exp_avg_sq.stored);
  }
}

template <typename M>
__global__ void __launch_bounds__(kThreads) fold_kernel(const __grid_constant__ Batch batch) {
  using Value = typename M::Value;
  constexpr int kSize = std::is_same_v<Value, double> ? 2 : 8;  // 8: the elements of one draw
  static_assert(kShortestChunk % kSize == 0);
  const Chunk chunk = find_chunk(batch.tensors, batch.tensor_count, batch.chunk_length, blockIdx.x);
  const BatchedTensor& tensor = batch.tensors[chunk.tensor];
  if (is_skipped(tensor)) return;
  __shared__ Start<Value> shared;
  if (threadIdx.x == 0) shared = start_of<Value, M::kRule>(batch, tensor);
  __syncthreads();
  const Coefficients<Value> c = shared.coefficients;
  const Random random(batch, tensor, shared.step);
  const bool vectors = is_aligned<typename M::Param, kSize>(tensor.grad) &&
                       is_aligned<typename M::State, kSize>(tensor.exp_avg, tensor.exp_avg_sq);
  const int64_t end = chunk.begin + chunk.count;
  const int64_t last = vectors ? end / kSize * kSize : chunk.begin;
  if (c.phase == StepPhase::kFirstFold) {
    fold_vectors<M, true, kSize>(tensor, chunk.begin, last, c, random);
    fold_vectors<M, true, 1>(tensor, last, end, c, random);
  } else {
    fold_vectors<M, false, kSize>(tensor, chunk.begin, last, c, random);
    fold_vectors<M, false, 1>(tensor, last, end, c, random);
  }
}

struct FoldSource {
  template <DType dtype>
  static constexpr StepKernel kernel() {
    using Param = vector::DeviceStorageOf<dtype>;
    // States of float and double parameters have the parameter's type.
    constexpr StateFormat states =
        folds(dtype, StateFormat::kAsParam) ? StateFormat::kAsParam : StateFormat::kFloat;
    static_assert(folds(dtype, states));
    return fold_kernel<Mode<Param, ParamFormat::kPlain, states, Rule::kAdam>>;
  }
};

struct Folds {
  StepKernel kernels[vector::kDTypes];
};

constexpr Folds fold_kernels() {
  Folds folds{};
  fill<FoldSource>(folds.kernels);
  return folds;
}

constexpr Folds kFolds = fold_kernels();

}  // namespace

StepKernel fold_kernel_of(DType param) { return kFolds.kernels[static_cast<int>(param)]; }

}  // namespace memsave_ext::adam
