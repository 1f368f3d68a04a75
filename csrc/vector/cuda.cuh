// Values in memory and in registers on CUDA: loads of up to 16 bytes, and conversions.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "vector/types.h"

namespace memsave_ext::vector {

// Left to itself, nvcc keeps values of some kernels in memory there, to have room for more blocks.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000
constexpr bool kIsBlackwell = true;
#else
constexpr bool kIsBlackwell = false;
#endif

// The type in which values of a DType are stored: CUDA's own in place of those of vector/types.h.
template <DType dtype>
struct StoredOnDevice : Stored<dtype> {};
template <>
struct StoredOnDevice<DType::kHalf> {
  using type = __half;
};
template <>
struct StoredOnDevice<DType::kBFloat16> {
  using type = __nv_bfloat16;
};
template <DType dtype>
using DeviceStorageOf = typename StoredOnDevice<dtype>::type;

// Converts a stored value to the type in which it is computed.
__device__ __forceinline__ double widen(double x) { return x; }
__device__ __forceinline__ float widen(float x) { return x; }
__device__ __forceinline__ float widen(__half x) { return __half2float(x); }
__device__ __forceinline__ float widen(__nv_bfloat16 x) { return __bfloat162float(x); }

// Converts a computed value to the type T in which it is stored, rounding to nearest.
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

// Values of 2 bytes are kept in pairs, because each alone would take a register of 4 bytes.
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
      return word_of(__floats2bfloat162_rn(low, high));
    } else {
      return word_of(__floats2half2_rn(low, high));
    }
  }

  template <typename Pair>
  static __device__ __forceinline__ uint32_t word_of(const Pair& pair) {
    uint32_t word;
    memcpy(&word, &pair, sizeof(word));
    return word;
  }
};

// These two take `offset` in vectors, not in elements or bytes.
template <typename Vec>
__device__ __forceinline__ Vec load(const void* from, int64_t offset) {
  return static_cast<const Vec*>(from)[offset];
}

template <typename Vec>
__device__ __forceinline__ void store(void* to, int64_t offset, const Vec& vector) {
  static_cast<Vec*>(to)[offset] = vector;
}

// A vector that need not be aligned, or of which only the first `count` elements exist.
struct Part {
  int64_t begin;  // in elements
  int count;      // of elements that exist
};

// These two load and store a part. Vec::Element is the type of Vec's elements; load() gives 0 for
// elements that do not exist.
template <typename Vec>
__device__ __forceinline__ Vec load(const void* from, Part part) {
  using T = typename Vec::Element;
  constexpr int size = sizeof(Vec) / sizeof(T);
  T elements[size];
  memset(elements, 0, sizeof(elements));
#pragma unroll
  for (int i = 0; i < size; ++i) {
    if (i < part.count) elements[i] = static_cast<const T*>(from)[part.begin + i];
  }
  Vec vector;
  memcpy(&vector, elements, sizeof(vector));
  return vector;
}

template <typename Vec>
__device__ __forceinline__ void store(void* to, Part part, const Vec& vector) {
  using T = typename Vec::Element;
  constexpr int size = sizeof(Vec) / sizeof(T);
  T elements[size];
  memcpy(elements, &vector, sizeof(vector));
#pragma unroll
  for (int i = 0; i < size; ++i) {
    if (i < part.count) static_cast<T*>(to)[part.begin + i] = elements[i];
  }
}

}  // namespace memsave_ext::vector
