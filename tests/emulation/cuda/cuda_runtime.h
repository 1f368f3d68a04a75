// What kernels and their launches name of CUDA, for the host's compiler. translate.py rewrites what
// no macro can: launches, __shared__ and __launch_bounds__.
#pragma once

#include <algorithm>
#include <cfenv>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>

#include "device.h"

#define __CUDA_ARCH__ 900
#define __device__
#define __forceinline__ inline
#define __global__
#define __grid_constant__
#define __host__

using std::isfinite;
using std::isinf;
using std::max;

struct alignas(16) double2 {
  double x, y;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
inline double2 make_double2(double x, double y) { return {x, y}; }

// ---- Barriers and shuffles ----------------------------------------------------------------------

inline void __syncthreads(emulation::Place place = emulation::Place::here()) {
  emulation::block_barrier(place);
}
inline int __syncthreads_and(int value, emulation::Place place = emulation::Place::here()) {
  return emulation::block_barrier(place, value != 0);
}
inline void __syncwarp(uint32_t mask = ~0u, emulation::Place place = emulation::Place::here()) {
  emulation::warp_barrier(place, mask);
}

template <typename T>
T __shfl_xor_sync(uint32_t mask, T value, int distance,
                  emulation::Place place = emulation::Place::here()) {
  static_assert(sizeof(T) <= sizeof(uint64_t));
  uint64_t bits = 0;
  memcpy(&bits, &value, sizeof(T));
  bits = emulation::shuffle(place, mask, bits, distance);
  memcpy(&value, &bits, sizeof(T));
  return value;
}

// ---- Bits and arithmetic ------------------------------------------------------------------------

namespace emulation {

template <typename To, typename From>
To bits_as(From value) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  memcpy(&to, &value, sizeof(to));
  return to;
}

}  // namespace emulation

inline uint32_t __float_as_uint(float x) { return emulation::bits_as<uint32_t>(x); }
inline float __uint_as_float(uint32_t x) { return emulation::bits_as<float>(x); }
inline long long __double_as_longlong(double x) { return emulation::bits_as<long long>(x); }
inline double __longlong_as_double(long long x) { return emulation::bits_as<double>(x); }
inline int __popc(uint32_t x) { return __builtin_popcount(x); }

// Compiled without contraction.
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline double __dmul_rn(double a, double b) { return a * b; }
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline double __fma_rn(double a, double b, double c) { return std::fma(a, b, c); }
inline float __fsqrt_rn(float x) { return std::sqrt(x); }
// Exact here, as is all that a card approximates.
inline float __fdividef(float a, float b) { return a / b; }
inline double __dsqrt_rn(double x) { return std::sqrt(x); }

// The sum of floats is exact in double, or as good as that: what is cut off stays cut off.
inline float __fadd_rz(float a, float b) {
  const double sum = static_cast<double>(a) + static_cast<double>(b);
  const float nearest = static_cast<float>(sum);
  return std::fabs(static_cast<double>(nearest)) > std::fabs(sum) ? std::nextafter(nearest, 0.0f)
                                                                  : nearest;
}

// Bytes of low and high, each chosen by a digit of the selector.
inline uint32_t __umulhi(uint32_t a, uint32_t b) {
  return static_cast<uint32_t>(static_cast<uint64_t>(a) * b >> 32);
}

inline uint32_t __byte_perm(uint32_t low, uint32_t high, uint32_t selector) {
  const uint64_t bytes = static_cast<uint64_t>(high) << 32 | low;
  uint32_t result = 0;
  for (int i = 0; i < 4; ++i) {
    result |= static_cast<uint32_t>(bytes >> (8 * (selector >> (4 * i) & 7)) & 0xff) << (8 * i);
  }
  return result;
}

// ---- The runtime --------------------------------------------------------------------------------

using cudaStream_t = void*;
enum cudaError_t { cudaSuccess, cudaErrorLaunchFailure };
enum cudaDeviceAttr { cudaDevAttrMaxSharedMemoryPerBlockOptin, cudaDevAttrMultiProcessorCount };
enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize };
enum cudaMemcpyKind { cudaMemcpyDeviceToHost };

// Launches that a card refuses end the program; those that are to fail here ran before they do.
inline cudaError_t cudaGetLastError() {
  return std::getenv("MEMSAVE_EXT_LAUNCHES_FAIL") == nullptr ? cudaSuccess : cudaErrorLaunchFailure;
}
inline const char* cudaGetErrorString(cudaError_t) { return "cannot be launched"; }
inline cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}
inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  const bool is_count = attribute == cudaDevAttrMultiProcessorCount;
  *value = is_count ? 132 : static_cast<int>(emulation::kMostSharedBytes);
  return cudaSuccess;
}
template <typename... Parameters>
cudaError_t cudaFuncSetAttribute(void (*kernel)(Parameters...), cudaFuncAttribute, int bytes) {
  emulation::allow_dynamic_shared(reinterpret_cast<emulation::KernelPointer>(kernel), bytes);
  return cudaSuccess;
}
inline cudaError_t cudaMalloc(void* pointer, size_t bytes) {
  *static_cast<void**>(pointer) = std::malloc(bytes);
  return cudaSuccess;
}
inline cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind) {
  memcpy(to, from, bytes);
  return cudaSuccess;
}
inline cudaError_t cudaFree(void* pointer) {
  std::free(pointer);
  return cudaSuccess;
}
