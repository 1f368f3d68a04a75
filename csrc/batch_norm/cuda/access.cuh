// How a kernel reads tensors and channel vectors.
#pragma once

#include <cstdint>

#include "batch_norm/kernels.h"
#include "vector/cuda.cuh"

namespace memsave_ext::batch_norm {

using vector::load;
using vector::narrow;
using vector::store;
using vector::ValueOf;
using vector::Vector;
using vector::widen;

template <typename Value>
struct Pair {
  Value first, second;
};

// A tensor of T, read `vector` values at a time. `channels_last`: the values of a vector belong to
// different channels (inner == 1); otherwise to one.
template <typename T, int vector, bool channels_last>
struct Access {
  using Element = T;
  using Value = ValueOf<T>;
  using Vec = Vector<T, vector>;
  static constexpr bool kChannelsLast = channels_last;
  static constexpr int kVector = vector;
  static constexpr int kChannels = channels_last ? vector : 1;  // channels per thread
  static constexpr int kUnroll = vector == 1 ? 8 : 4;  // vectors loaded before the first is used

  // The channel of the value at this place of a vector, counted among the thread's channels.
  static constexpr __device__ int channel(int value) { return channels_last ? value : 0; }
};

// Loads `count` channels, from `channel` on, of the dense channel vector `from` of type `Stored`.
// Where `from` is null, all are `fallback`.
template <typename Stored, typename Value, int count>
__device__ __forceinline__ void load_channels(const void* from, int64_t channel, Value fallback,
                                              Value (&to)[count]) {
  if (from == nullptr) {
#pragma unroll
    for (int i = 0; i < count; ++i) to[i] = fallback;
    return;
  }
  const Stored* values = static_cast<const Stored*>(from) + channel;
  constexpr int kWide = count * sizeof(Stored) < 16 ? count : 16 / sizeof(Stored);
  if constexpr (count > 1) {
    if (reinterpret_cast<uintptr_t>(values) % (kWide * sizeof(Stored)) == 0) {
#pragma unroll
      for (int i = 0; i < count; i += kWide) {
        const auto wide = load<Vector<Stored, kWide>>(values + i, 0);
#pragma unroll
        for (int j = 0; j < kWide; ++j) to[i + j] = wide[j];
      }
      return;
    }
  }
#pragma unroll
  for (int i = 0; i < count; ++i) to[i] = widen(values[i]);
}

}  // namespace memsave_ext::batch_norm
