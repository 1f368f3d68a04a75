// The step of blockwise states. A warp steps kBlock elements, one block of a state or several,
// because a block's scale is known only when all of its new values are.
#pragma once

#include "adam/blockwise.h"
#include "adam/cuda/formats.cuh"
#include "adam/cuda/launch.cuh"

namespace memsave_ext::adam {

using Draws = Bits<8>;

constexpr int kWarp = 32;
constexpr int kOfThread = 8;  // elements that each thread steps
static_assert(kOfThread * kWarp == kBlock && kShortestChunk % kBlock == 0);

using CodesOfThread = Bytes<kOfThread>;

// Returns a block's scale: the largest magnitude of the threads that step it, whose bits these are.
template <int threads>
__device__ __forceinline__ float scale_of_block(uint32_t bits) {
#pragma unroll
  for (int distance = threads / 2; distance > 0; distance /= 2) {
    bits = max(bits, __shfl_xor_sync(~0u, bits, distance));
  }
  return __uint_as_float(bits);
}

// Returns the bits of a magnitude. As integers, infinity and NaN are larger than numbers.
__device__ __forceinline__ uint32_t magnitude(float x) { return __float_as_uint(x) & 0x7fffffffu; }

// Sets both moments of elements that are lost (kLost) to 0, and finds the largest of the `count`
// first ones again.
__device__ __forceinline__ void drop_lost(float (&exp_avg)[kOfThread], float (&roots)[kOfThread],
                                          int count, uint32_t& largest, uint32_t& largest_sq) {
  largest = largest_sq = 0;
#pragma unroll
  for (int e = 0; e < kOfThread; ++e) {
    if (max(magnitude(exp_avg[e]), magnitude(roots[e])) >= kLost) exp_avg[e] = roots[e] = 0;
    if (e < count) {
      largest = max(largest, magnitude(exp_avg[e]));
      largest_sq = max(largest_sq, magnitude(roots[e]));
    }
  }
}

template <typename M>
struct OfThread {
  using Param = Params<M, kOfThread>;
  using Stored = typename Param::Stored;
  Param param;
  Stored grad;
  static constexpr bool kJoint = is_joint(M::kStates);
  static constexpr bool kSecond = M::kMoments > 1 && !kJoint;  // exp_avg_sq has codes of its own
  static constexpr int kBits = Coding<M::kStates>::kCodes.bits;
  CodesOfThread exp_avg, exp_avg_sq;  // kJoint: all are in the first

  // place: the index of a whole vector, or a Part of one.
  template <typename Place>
  __device__ __forceinline__ void load(const BatchedTensor& tensor, Place place) {
    param.stored = vector::load<Stored>(tensor.param, place);
    if constexpr (M::kHasLowPart) {
      param.low_part = vector::load<typename Param::LowPart>(tensor.param_low_part, place);
    }
    grad = vector::load<Stored>(tensor.grad, place);
    exp_avg = vector::load<CodesOfThread>(tensor.exp_avg, place);
    if constexpr (kSecond) exp_avg_sq = vector::load<CodesOfThread>(tensor.exp_avg_sq, place);
  }

  template <typename Place>
  __device__ __forceinline__ void store(const BatchedTensor& tensor, Place place) const {
    vector::store(tensor.param, place, param.stored);
    if constexpr (M::kHasLowPart) vector::store(tensor.param_low_part, place, param.low_part);
    vector::store(tensor.exp_avg, place, exp_avg);
    if constexpr (kSecond) vector::store(tensor.exp_avg_sq, place, exp_avg_sq);
  }

  __device__ __forceinline__ uint32_t code_sq(int i) const {
    return kJoint ? exp_avg[i] >> kBits : exp_avg_sq[i];
  }

  __device__ __forceinline__ void set_codes(int i, uint32_t code, uint32_t code_sq) {
    exp_avg.set(i, kJoint ? code | code_sq << kBits : code);
    if constexpr (kSecond) exp_avg_sq.set(i, code_sq);
  }
};

// Steps the elements from kBlock * i on by one warp. `vectors`: whether the pointers are aligned
// for vectors.
template <typename M>
__device__ __forceinline__ void step_block(const BatchedTensor& tensor, int64_t i, bool vectors,
                                           const Coefficients<float>& c, const Random& random) {
  using Code = Coding<M::kStates>;
  constexpr bool kTwo = M::kMoments > 1;
  constexpr int kThreadsOfBlock = static_cast<int>(Code::kCodes.block) / kOfThread;
  const int lane = threadIdx.x % kWarp;
  const int64_t group = i * kWarp + lane, left = tensor.numel - group * kOfThread;
  const Part part = {group * kOfThread, static_cast<int>(left < 0           ? 0
                                                         : left < kOfThread ? left
                                                                            : kOfThread)};
  const bool whole = vectors && part.count == kOfThread;
  OfThread<M> x;
  const int64_t block = group / kThreadsOfBlock;
  const bool exists = block * Code::kCodes.block < tensor.numel;
  float scale = exists ? tensor.exp_avg_scale[block] : 0;
  float scale_sq = kTwo && exists ? tensor.exp_avg_sq_scale[block] : 0;
  if (whole) {
    x.load(tensor, group);
  } else {
    x.load(tensor, part);
  }
  Draws of_param{}, of_moments{};
  if constexpr (M::kRandomParam) of_param = Draws::draw(random, Draw::kParam, group);

  float exp_avg[kOfThread], roots[kOfThread] = {};
  uint32_t largest = 0, largest_sq = 0;
  constexpr int kWord = OfThread<M>::Param::kWord;
#pragma unroll
  for (int w = 0; w < kOfThread / kWord; ++w) {
    float params[kWord];
#pragma unroll
    for (int k = 0; k < kWord; ++k) {
      const int e = w * kWord + k;
      Values<float> values = {x.param.get(w, k),
                              Code::template decode_exp_avg<Math>(x.exp_avg[e], scale)};
      if constexpr (kTwo) {
        values.exp_avg_sq = Code::template decode_exp_avg_sq<Math>(x.code_sq(e), scale_sq);
      }
      update<ApproximateMath, M::kRule, true>(c, x.grad.words[w][k], values);
      params[k] = values.param;
      exp_avg[e] = values.exp_avg;
      if constexpr (kTwo) roots[e] = ApproximateMath::square_root(values.exp_avg_sq);
      if (e < part.count) {
        largest = max(largest, magnitude(exp_avg[e]));
        if constexpr (kTwo) largest_sq = max(largest_sq, magnitude(roots[e]));
      }
    }
    x.param.set(w, params, of_param.words[w % Draws::kWords]);
  }
  if (max(largest, largest_sq) >= kLost) {  // seldom
    drop_lost(exp_avg, roots, part.count, largest, largest_sq);
  }
  if constexpr (kRandomMoments) of_moments = Draws::draw(random, Draw::kMoments, group);
  scale = scale_of_block<kThreadsOfBlock>(largest);
  if constexpr (kTwo) scale_sq = scale_of_block<kThreadsOfBlock>(largest_sq);
  const float inverse = inverse_scale<Math>(scale), inverse_sq = inverse_scale<Math>(scale_sq);
#pragma unroll
  for (int e = 0; e < kOfThread; ++e) {
    const uint32_t drawn = of_moments.of(e);
    const uint32_t code = Code::template encode_exp_avg<Math>(exp_avg[e], inverse, drawn);
    uint32_t code_sq = 0;
    if constexpr (kTwo) code_sq = Code::template encode_root<Math>(roots[e], inverse_sq, drawn);
    x.set_codes(e, code, code_sq);
  }
  if (whole) {
    x.store(tensor, group);
  } else {
    x.store(tensor, part);
  }
  __syncwarp();  // all lanes have read the scales; shuffles do not order memory
  if (lane % kThreadsOfBlock == 0 && exists) {
    tensor.exp_avg_scale[block] = scale;
    if constexpr (kTwo) tensor.exp_avg_sq_scale[block] = scale_sq;
  }
}

template <typename M>
__global__ void __launch_bounds__(kThreads, 3) blocks_kernel(const __grid_constant__ Batch batch) {
  const Chunk chunk = find_chunk(batch.tensors, batch.tensor_count, batch.chunk_length, blockIdx.x);
  const BatchedTensor& tensor = batch.tensors[chunk.tensor];
  if (is_skipped(tensor)) return;
  __shared__ Start<float> shared;
  if (threadIdx.x == 0) shared = start_of<float, M::kRule, true>(batch, tensor);
  __syncthreads();
  const Random random(batch, tensor, shared.step);
  const bool vectors = params_are_aligned<M, kOfThread>(tensor) &&
                       is_aligned_for<CodesOfThread>(tensor.exp_avg, tensor.exp_avg_sq);
  const int64_t end = (chunk.begin + chunk.count + kBlock - 1) / kBlock;
  const Coefficients<float> c = shared.coefficients;
#pragma unroll 1
  for (int64_t i = chunk.begin / kBlock + threadIdx.x / kWarp; i < end; i += kThreads / kWarp) {
    step_block<M>(tensor, i, vectors, c, random);
  }
}

template <StateFormat states>
struct BlocksSource {
  static constexpr bool makes(const Combination& c) { return c.states == states; }

  template <int index>
  static constexpr StepKernel kernel() {
    constexpr Combination c = Combination::at(index);
    return blocks_kernel<Mode<vector::DeviceStorageOf<c.param>, c.format, c.states, c.rule>>;
  }
};

template <StateFormat states>
constexpr StepKernels blocks_kernels() {
  StepKernels kernels{};
  fill<BlocksSource<states>>(kernels);
  return kernels;
}

}  // namespace memsave_ext::adam
