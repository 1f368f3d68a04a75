// Sums over threads, blocks and chunks, in a fixed order, and the moments of a channel from them.
// A thread sums deviations from its own first value, in float. Sums over several threads are of
// deviations from the channel's first value, in double. Plain sums are accurate there, whatever
// that first value is: if it is far from the others, it is itself the larger part of the variance.
#pragma once

#include <cuda_runtime.h>

#include "batch_norm/cuda/access.cuh"
#include "batch_norm/cuda/partition.cuh"

namespace memsave_ext::batch_norm {

__device__ __forceinline__ double2 operator+(double2 a, double2 b) {
  return make_double2(a.x + b.x, a.y + b.y);
}

__device__ __forceinline__ double2 sum_warp(double2 value) {
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) {
    value = value + make_double2(__shfl_xor_sync(~0u, value.x, distance),
                                 __shfl_xor_sync(~0u, value.y, distance));
  }
  return value;
}

// Returns the sum over a block of whole warps to the threads of the first warp. A kernel may call
// it only once.
__device__ __forceinline__ double2 sum_block(double2 value) {
  __shared__ double2 of_warps[32];
  const int lane = threadIdx.x % 32;
  value = sum_warp(value);
  if (lane == 0) of_warps[threadIdx.x / 32] = value;
  __syncthreads();
  if (threadIdx.x >= 32) return value;
  return sum_warp(lane < blockDim.x / 32 ? of_warps[lane] : make_double2(0, 0));
}

// Sums over lanes_y, each channel by itself; the threads of the first row get the result. A kernel
// may call it only once.
template <typename A>
__device__ __forceinline__ void sum_rows(double2 (&values)[A::kChannels], const Partition& p,
                                         const typename A::Walk& walk) {
  __shared__ double2 upper[A::kVector][kThreads / 2];
  const int thread = threadIdx.x, y = thread / p.lanes_x;
  const Channels channels = walk.channels(p);
  // The place for value i in a row of threads: by channel, because masked vectors of other rows
  // have it elsewhere.
  const auto place = [&](int row, int i) -> double2& {
    if constexpr (A::kMasked) {
      const unsigned channel = walk.lead(p) + i;
      return upper[channel % A::kVector][row * p.lanes_x + channel / A::kVector];
    } else {
      return upper[i][thread + (row - y) * p.lanes_x];
    }
  };
  for (int rows = p.lanes_y; rows > 1;) {
    const int half = (rows + 1) / 2;
    if (y >= half && y < rows) {
#pragma unroll
      for (int i = 0; i < A::kVector; ++i) {
        if (channels.has(i)) place(y - half, i) = values[i];
      }
    }
    __syncthreads();
    if (y + half < rows) {
#pragma unroll
      for (int i = 0; i < A::kVector; ++i) {
        if (channels.has(i)) values[i] = values[i] + place(y, i);
      }
    }
    __syncthreads();
    rows = half;
  }
}

// Sums over the block for each channel of a thread. Returns whether this thread has the result.
template <typename A>
__device__ __forceinline__ bool sum_channels(double2 (&sums)[A::kChannels], const Partition& p,
                                             const typename A::Walk& walk) {
  if constexpr (A::kChannelsLast) {
    sum_rows<A>(sums, p, walk);
    return threadIdx.x < p.lanes_x;
  } else {
    sums[0] = sum_block(sums[0]);
    return threadIdx.x == 0;
  }
}

// Returns the sum over all chunks of channel blockIdx.x to the first thread.
__device__ __forceinline__ double2 sum_chunks(const double2* partials, int64_t chunks) {
  double2 sums = {0, 0};
  for (int64_t chunk = threadIdx.x; chunk < chunks; chunk += blockDim.x) {
    sums = sums + partials[blockIdx.x * chunks + chunk];
  }
  return sum_block(sums);
}

// Two sums over the values of a thread, kept apart for each place in a vector.
template <typename A>
struct ThreadSums {
  using Value = typename A::Value;
  Value first[A::kVector] = {}, second[A::kVector] = {};

  // Adds up the places of each channel of the thread.
  __device__ __forceinline__ void fold(double2 (&to)[A::kChannels]) const {
    Value a[A::kChannels] = {}, b[A::kChannels] = {};
#pragma unroll
    for (int i = 0; i < A::kVector; ++i) {
      a[A::channel(i)] += first[i];
      b[A::channel(i)] += second[i];
    }
#pragma unroll
    for (int c = 0; c < A::kChannels; ++c) to[c] = make_double2(a[c], b[c]);
  }
};

// A thread's sums of deviations from its first value, and of their squares.
template <typename A>
struct ThreadMoments : ThreadSums<A> {
  using Value = typename A::Value;
  static constexpr bool kCountsValues = A::kMasked && !A::kChannelsLast;
  Value shift[A::kChannels] = {};
  int items = 0;  // that were added; channels first and masked, values

  // Adds the values in `mask`, of which there must be one.
  __device__ __forceinline__ void add(const typename A::Vec& x, uint32_t mask) {
    if (items == 0) set_shift(x, mask);
    items += kCountsValues ? __popc(mask) : 1;
#pragma unroll
    for (int i = 0; i < A::kVector; ++i) {
      const Value deviation = A::keep(mask, i, x[i] - shift[A::channel(i)]);
      this->first[i] += deviation;
      this->second[i] += deviation * deviation;
    }
  }

  // Converts them to sums of deviations from `origin`, for each channel of the thread.
  __device__ __forceinline__ void fold_about(const typename A::Vec& origin,
                                             double2 (&sums)[A::kChannels]) const {
    this->fold(sums);
    if (items == 0) return;
    const double count =
        static_cast<double>(items) * (kCountsValues ? 1 : A::kVector / A::kChannels);
#pragma unroll
    for (int c = 0; c < A::kChannels; ++c) {
      const double distance = static_cast<double>(shift[c]) - static_cast<double>(origin[c]);
      sums[c].y += distance * (2 * sums[c].x + count * distance);
      sums[c].x += count * distance;
    }
  }

 private:
  __device__ __forceinline__ void set_shift(const typename A::Vec& x, uint32_t mask) {
    if constexpr (!kCountsValues) {
#pragma unroll
      for (int c = 0; c < A::kChannels; ++c) shift[c] = x[c];
    } else {
#pragma unroll
      for (int i = A::kVector - 1; i >= 0; --i) {
        if ((mask >> i & 1) != 0) shift[0] = x[i];
      }
    }
  }
};

// Where the moments of the channels are written, and what else is computed from them.
struct Summary {
  void* out;    // (2, C)
  bool invstd;  // true: out gets mean and 1 / sqrt(m2 / count + eps); false: mean and m2
  double eps;
  Running running;
  int64_t channels;
  int64_t count;
};

// Writes a channel's moments, given its sums of deviations from `origin` and of their squares.
// Returns what it wrote to `out`.
template <typename Value>
__device__ __forceinline__ Pair<Value> write_moments(const Summary& to, int64_t channel,
                                                     double2 sums, double origin) {
  const double count = static_cast<double>(to.count);
  const double distance = sums.x / count;
  const double rounded = sums.y - sums.x * distance;
  const double m2 = rounded < 0 ? 0 : rounded;
  const double mean = m2 == m2 ? origin + distance : m2;  // if a value is not finite, both are NaN
  const Pair<Value> out = {static_cast<Value>(mean),
                           static_cast<Value>(to.invstd ? 1 / sqrt(m2 / count + to.eps) : m2)};
  static_cast<Value*>(to.out)[channel] = out.first;
  static_cast<Value*>(to.out)[to.channels + channel] = out.second;
  update<Value>(to.running.mean, channel, to.running.momentum, mean);
  update<Value>(to.running.var, channel, to.running.momentum, m2 / (count - 1));
  return out;
}

// Where the channels' sums are written: of the gradient of z (`sum`), and of its product with the
// normalised x (`dot`). Any pointer may be null.
struct ChannelSums {
  void* sum;
  void* dot;
  void* means;  // (2, C): both sums divided by count
  int64_t channels;
  int64_t count;
};

// Writes a channel's sums and returns both divided by count.
template <typename Value>
__device__ __forceinline__ Pair<Value> write_sums(const ChannelSums& to, int64_t channel,
                                                  double2 sums) {
  const double count = static_cast<double>(to.count);
  const Pair<Value> means = {static_cast<Value>(sums.x / count),
                             static_cast<Value>(sums.y / count)};
  if (to.sum != nullptr) static_cast<Value*>(to.sum)[channel] = static_cast<Value>(sums.x);
  if (to.dot != nullptr) static_cast<Value*>(to.dot)[channel] = static_cast<Value>(sums.y);
  if (to.means != nullptr) {
    static_cast<Value*>(to.means)[channel] = means.first;
    static_cast<Value*>(to.means)[to.channels + channel] = means.second;
  }
  return means;
}

}  // namespace memsave_ext::batch_norm
