// Values in memory and in registers: loads of up to 16 bytes, conversions, vectors of channels.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "batch_norm/kernels.h"

namespace memsave_ext::batch_norm {

template <typename T>
using ValueOf = std::conditional_t<std::is_same_v<T, double>, double, float>;

__device__ __forceinline__ double widen(double x) { return x; }
__device__ __forceinline__ float widen(float x) { return x; }
__device__ __forceinline__ float widen(__half x) { return __half2float(x); }
__device__ __forceinline__ float widen(__nv_bfloat16 x) { return __bfloat162float(x); }

template <typename T>
__device__ __forceinline__ T narrow(ValueOf<T> x) {
  if constexpr (std::is_same_v<T, __half>) {
    return __float2half_rn(x);
  } else if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    return __float2bfloat16_rn(x);
  } else {
    return x;
  }
}

// Consecutive values of a tensor, loaded and stored by one instruction.
template <typename T, int size, bool pairs = sizeof(T) == 2 && size % 2 == 0>
struct alignas(sizeof(T) * size) Vector {
  using Value = ValueOf<T>;
  T values[size];

  __device__ __forceinline__ Value operator[](int i) const { return widen(values[i]); }

  static __device__ __forceinline__ Vector from(const Value (&wide)[size]) {
    Vector vector;
#pragma unroll
    for (int i = 0; i < size; ++i) vector.values[i] = narrow<T>(wide[i]);
    return vector;
  }
};

// Words, because values of 2 bytes would each take a register of 4 while they wait.
template <typename T, int size>
struct alignas(sizeof(T) * size) Vector<T, size, true> {
  uint32_t words[size / 2];

  __device__ __forceinline__ float operator[](int i) const {
    const uint32_t word = words[i / 2];
    if constexpr (std::is_same_v<T, __nv_bfloat16>) {
      return __uint_as_float(i % 2 == 0 ? word << 16 : word & 0xffff0000u);
    } else {
      return __half2float(__ushort_as_half(static_cast<uint16_t>(i % 2 == 0 ? word : word >> 16)));
    }
  }

  static __device__ __forceinline__ Vector from(const float (&wide)[size]) {
    Vector vector;
#pragma unroll
    for (int i = 0; i < size; i += 2) vector.words[i / 2] = pack(wide[i], wide[i + 1]);
    return vector;
  }

 private:
  static __device__ __forceinline__ uint32_t pack(float low, float high) {
    if constexpr (std::is_same_v<T, __nv_bfloat16>) {
      const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
      return reinterpret_cast<const uint32_t&>(pair);
    } else {
      const __half2 pair = __floats2half2_rn(low, high);
      return reinterpret_cast<const uint32_t&>(pair);
    }
  }
};

// Both take offsets in vectors.
template <typename Vec>
__device__ __forceinline__ Vec load(const void* from, int64_t offset) {
  return static_cast<const Vec*>(from)[offset];
}

template <typename Vec>
__device__ __forceinline__ void store(void* to, int64_t offset, const Vec& vector) {
  static_cast<Vec*>(to)[offset] = vector;
}

template <typename Value>
struct Pair {
  Value first, second;
};

// How a kernel sees a tensor. Rows: the values of a vector are of different channels.
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
