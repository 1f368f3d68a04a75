// How a kernel sees a tensor, and vectors of channels.
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

// Rows: the values of a vector are of different channels.
template <typename T, int vector, bool rows>
struct Access {
  using Value = ValueOf<T>;
  using Vec = Vector<T, vector>;
  static constexpr bool kRows = rows;
  static constexpr int kVector = vector;
  static constexpr int kChannels = rows ? vector : 1;  // of a thread
  static constexpr int kUnroll = vector == 1 ? 8 : 4;  // loads in flight

  // The channel of a vector's value, among those of the thread.
  static constexpr __device__ int channel(int value) { return rows ? value : 0; }
};

// Of a dense vector over the channels; `fallback` where there is none.
template <typename Value, int count>
__device__ __forceinline__ void load_channels(const void* from, int64_t channel, Value fallback,
                                              Value (&to)[count]) {
  if (from == nullptr) {
#pragma unroll
    for (int i = 0; i < count; ++i) to[i] = fallback;
    return;
  }
  const Value* values = static_cast<const Value*>(from) + channel;
  constexpr int kWide = 16 / sizeof(Value);
  if constexpr (count % kWide == 0) {
    if (reinterpret_cast<uintptr_t>(values) % 16 == 0) {
#pragma unroll
      for (int i = 0; i < count; i += kWide) {
        const auto wide = load<Vector<Value, kWide>>(values + i, 0);
#pragma unroll
        for (int j = 0; j < kWide; ++j) to[i + j] = wide[j];
      }
      return;
    }
  }
#pragma unroll
  for (int i = 0; i < count; ++i) to[i] = values[i];
}

}  // namespace memsave_ext::batch_norm
