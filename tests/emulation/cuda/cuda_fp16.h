// IEEE's half precision, as NVIDIA's cuda_fp16.h converts it.
#pragma once

#include "cuda_runtime.h"

struct __half {
  uint16_t bits;
};
struct alignas(4) __half2 {
  __half x, y;
};

inline __half __ushort_as_half(uint16_t bits) { return {bits}; }

inline float __half2float(__half x) {
  const uint32_t sign = static_cast<uint32_t>(x.bits & 0x8000u) << 16, magnitude = x.bits & 0x7fffu;
  if (magnitude > 0x7c00u) return __uint_as_float(0x7fffffffu);  // one NaN for all
  if (magnitude == 0x7c00u) return __uint_as_float(sign | 0x7f800000u);
  // As a float of the smallest exponents, which the product moves to their place.
  return __uint_as_float(sign | __float_as_uint(__uint_as_float(magnitude << 13) * 0x1p112f));
}

// To nearest even.
inline __half __float2half_rn(float x) {
  const uint32_t bits = __float_as_uint(x), magnitude = bits & 0x7fffffffu;
  const uint32_t sign = bits >> 16 & 0x8000u;
  const auto half = [](uint32_t of) { return __half{static_cast<uint16_t>(of)}; };
  if (magnitude > 0x7f800000u) return half(0x7fffu);
  if (magnitude >= 0x477ff000u) return half(sign | 0x7c00u);
  if (magnitude < 0x38800000u) {  // below the normal ones: in steps of 2^-24, as a sum rounds
    return half(sign | (__float_as_uint(__uint_as_float(magnitude) + 0.5f) - 0x3f000000u));
  }
  return half(sign | (magnitude - 0x38000000u + 0xfffu + (magnitude >> 13 & 1)) >> 13);
}

inline __half2 __floats2half2_rn(float low, float high) {
  return {__float2half_rn(low), __float2half_rn(high)};
}
