// The step of all formats but blockwise states. One launch steps the tensors of one combination of
// formats; each block steps a chunk of one tensor.
#pragma once

#include "adam/cuda/formats.cuh"
#include "adam/cuda/launch.cuh"

namespace memsave_ext::adam {

// Steps the elements from `from` to `to` of a tensor by one block, in vectors of `size` elements.
template <typename M, int size>
__device__ __forceinline__ void step_vectors(const BatchedTensor& tensor, int64_t from, int64_t to,
                                             const Coefficients<typename M::Value>& c,
                                             const Random& random) {
  using Value = typename M::Value;
  using Param = Params<M, size>;
  using State = States<M, size>;
  using Draws = Bits<M::kRandomParam || M::kRandomStates ? size : 1>;
  using Arithmetic = std::conditional_t<M::kRandomStates, ApproximateMath, Math>;
  constexpr int kWord = Param::kWord;
#pragma unroll 1
  for (int64_t i = from / size + threadIdx.x; i < to / size; i += kThreads) {
    Param param;
    param.stored = vector::load<typename Param::Stored>(tensor.param, i);
    if constexpr (M::kHasLowPart) {
      param.low_part = vector::load<typename Param::LowPart>(tensor.param_low_part, i);
    }
    const auto grad = vector::load<typename Param::Stored>(tensor.grad, i);
    State exp_avg, exp_avg_sq, max_exp_avg_sq;
    if constexpr (M::kMoments > 0) {
      exp_avg.stored = vector::load<typename State::Stored>(tensor.exp_avg, i);
    }
    if constexpr (M::kMoments > 1) {
      exp_avg_sq.stored = vector::load<typename State::Stored>(tensor.exp_avg_sq, i);
    }
    if constexpr (M::kMoments > 2) {
      max_exp_avg_sq.stored = vector::load<typename State::Stored>(tensor.max_exp_avg_sq, i);
    }
    Draws of_param{}, of_moments{};
    if constexpr (M::kRandomParam) of_param = Draws::draw(random, Draw::kParam, i);
    if constexpr (M::kRandomStates) of_moments = Draws::draw(random, Draw::kMoments, i);
#pragma unroll
    for (int w = 0; w < size / kWord; ++w) {
      Value params[kWord], first[kWord], second[kWord], largest[kWord];
#pragma unroll
      for (int k = 0; k < kWord; ++k) {
        Values<Value> x = {param.get(w, k)};
        if constexpr (M::kMoments > 0) x.exp_avg = exp_avg.get(w, k);
        if constexpr (M::kMoments > 1) x.exp_avg_sq = exp_avg_sq.get(w, k);
        if constexpr (M::kMoments > 2) x.max_exp_avg_sq = max_exp_avg_sq.get(w, k);
        update<Arithmetic, M::kRule>(c, grad.words[w][k], x);
        params[k] = x.param;
        first[k] = x.exp_avg;
        second[k] = x.exp_avg_sq;
        largest[k] = x.max_exp_avg_sq;
      }
      const int drawn = w % Draws::kWords;  // w, where bits are drawn
      param.set(w, params, of_param.words[drawn]);
      if constexpr (M::kMoments > 0) exp_avg.set(w, first, of_moments.words[drawn]);
      if constexpr (M::kMoments > 1) exp_avg_sq.set(w, second, of_moments.words[drawn]);
      if constexpr (M::kMoments > 2) max_exp_avg_sq.set(w, largest, of_moments.words[drawn]);
    }
    vector::store(tensor.param, i, param.stored);
    if constexpr (M::kHasLowPart) vector::store(tensor.param_low_part, i, param.low_part);
    if constexpr (M::kMoments > 0) vector::store(tensor.exp_avg, i, exp_avg.stored);
    if constexpr (M::kMoments > 1) vector::store(tensor.exp_avg_sq, i, exp_avg_sq.stored);
    if constexpr (M::kMoments > 2) vector::store(tensor.max_exp_avg_sq, i, max_exp_avg_sq.stored);
  }
}

template <typename M>
__device__ __forceinline__ bool takes_vectors(const BatchedTensor& tensor) {
  return params_are_aligned<M, M::kSize>(tensor) &&
         is_aligned<typename M::State, M::kSize>(tensor.exp_avg, tensor.exp_avg_sq,
                                                 tensor.max_exp_avg_sq);
}

template <typename M>
__global__ void __launch_bounds__(kThreads, M::kMinBlocks)
    step_kernel(const __grid_constant__ Batch batch) {
  static_assert(kShortestChunk % M::kSize == 0);
  const Chunk chunk = find_chunk(batch.tensors, batch.tensor_count, batch.chunk_length, blockIdx.x);
  const BatchedTensor& tensor = batch.tensors[chunk.tensor];
  if (is_skipped(tensor)) return;
  __shared__ Start<typename M::Value> shared;
  if (threadIdx.x == 0) shared = start_of<typename M::Value, M::kRule>(batch, tensor);
  __syncthreads();
  const Random random(batch, tensor, shared.step);
  const int64_t end = chunk.begin + chunk.count;
  const int64_t last = takes_vectors<M>(tensor) ? end / M::kSize * M::kSize : chunk.begin;
  const Coefficients<typename M::Value> c = shared.coefficients;
  step_vectors<M, M::kSize>(tensor, chunk.begin, last, c, random);
  step_vectors<M, 1>(tensor, last, end, c, random);
}

// The kernels for states in this format.
template <StateFormat states>
struct StepSource {
  static constexpr bool makes(const Combination& c) { return c.states == states; }

  template <int index>
  static constexpr StepKernel kernel() {
    constexpr Combination c = Combination::at(index);
    return step_kernel<Mode<vector::DeviceStorageOf<c.param>, c.format, c.states, c.rule>>;
  }
};

template <StateFormat states>
constexpr StepKernels step_kernels() {
  StepKernels kernels{};
  fill<StepSource<states>>(kernels);
  return kernels;
}

}  // namespace memsave_ext::adam
