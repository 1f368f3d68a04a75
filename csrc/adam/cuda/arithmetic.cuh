// The Math that arithmetic.h, philox.h, formats.h and blockwise.h ask for, on CUDA, and what the
// threads of a block need to know of its step.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "adam/arithmetic.h"
#include "adam/cuda/batch.cuh"
#include "adam/philox.h"

namespace memsave_ext::adam {

// Returns a float's bits, the same for all NaNs: with random bits added it is still a NaN.
__device__ __forceinline__ uint32_t float_bits(float value) {
  return value == value ? __float_as_uint(value) : 0x7fc00000u;
}

// The values of IEEE: by intrinsics, whatever flags compile this, except for the quotient, which
// must not be compiled with fast division.
struct Math {
  static __device__ __forceinline__ float product(float a, float b) { return __fmul_rn(a, b); }
  static __device__ __forceinline__ double product(double a, double b) { return __dmul_rn(a, b); }
  static __device__ __forceinline__ float fused(float a, float b, float c) {
    return __fmaf_rn(a, b, c);
  }
  static __device__ __forceinline__ double fused(double a, double b, double c) {
    return __fma_rn(a, b, c);
  }
  static __device__ __forceinline__ float square_root(float x) { return __fsqrt_rn(x); }
  static __device__ __forceinline__ double square_root(double x) { return __dsqrt_rn(x); }

  template <typename T>
  static __device__ __forceinline__ T quotient(T a, T b) {
    return a / b;
  }

  template <typename T>
  static __device__ __forceinline__ T maximum(T a, T b) {
    return a != a || a > b ? a : b;
  }

  static __device__ __forceinline__ float smaller(float a, float b) { return fminf(a, b); }
  static __device__ __forceinline__ float larger(float a, float b) { return fmaxf(a, b); }
  static __device__ __forceinline__ float clamped(float x, float bound) {
    x = x > bound ? bound : x;
    return x < -bound ? -bound : x;
  }
  static __device__ __forceinline__ uint32_t zero_where_zero(float x, uint32_t integer) {
    return x != 0 ? integer : 0;
  }
  static __device__ __forceinline__ uint32_t bits(float x) { return __float_as_uint(x); }
  static __device__ __forceinline__ float from_bits(uint32_t x) { return __uint_as_float(x); }
  static __device__ __forceinline__ uint32_t number_bits(float x) { return float_bits(x); }
  static __device__ __forceinline__ uint32_t signed_upper(uint32_t x) {
    return static_cast<uint32_t>(static_cast<int32_t>(x) >> 16);
  }

  static constexpr bool kLooksUp = false;  // threads would wait for each other at a table
  static constexpr bool kMultipliesBits = true;
  static __device__ __forceinline__ uint32_t upper_half(uint32_t a, uint32_t b) {
    return __umulhi(a, b);
  }

  // In a float of 2^23 the lowest bits are an integer, which is added to it: a sum is cheaper than
  // a conversion. nearest() and truncated() return integers of 8 bits.
  static __device__ __forceinline__ float number(uint32_t x) {
    return __fsub_rn(__uint_as_float(x | 0x4b000000u), 0x1p23f);
  }
  static __device__ __forceinline__ uint32_t nearest(float x) {
    return __float_as_uint(__fadd_rn(x, 0x1p23f)) & 0xff;
  }
  static __device__ __forceinline__ uint32_t truncated(float x) {
    return __float_as_uint(__fadd_rz(x, 0x1p23f)) & 0xff;
  }

  struct Halves {
    uint32_t high, low;
  };
  static __device__ __forceinline__ Halves multiply(uint32_t a, uint32_t b) {
    const uint64_t product = static_cast<uint64_t>(a) * b;  // by one instruction
    return {static_cast<uint32_t>(product >> 32), static_cast<uint32_t>(product)};
  }
};

// For states that are rounded to 16 or 8 bits at random, beside which errors of 2^-22 do not count.
// IEEE's take Newton steps, and a branch at which elements wait for one another. __fdividef returns
// 0 for divisors from 2^126 on, but roots are below 2^64.
struct ApproximateMath : Math {
  static __device__ __forceinline__ float square_root(float x) {
#ifdef __CUDACC__
    float root;
    asm("sqrt.approx.f32 %0, %1;" : "=f"(root) : "f"(x));
    return root;
#else
    return __fsqrt_rn(x);
#endif
  }
  static __device__ __forceinline__ float quotient(float a, float b) { return __fdividef(a, b); }
};

template <typename Value>
struct Rounded {
  __device__ __forceinline__ Value operator()(double value) const {
    return static_cast<Value>(value);
  }
};

// What the threads of a block share of its step.
template <typename Value>
struct Start {
  Coefficients<Value> coefficients;
  uint32_t step;
};

// Returns the Start of a block that steps this tensor. Called by one thread. Without `clamps`
// nothing reads update_bound, which is 0 then.
template <typename Value, Rule rule, bool clamps = false>
__device__ __forceinline__ Start<Value> start_of(const Batch& batch, const BatchedTensor& tensor) {
  const Recipe& recipe = batch.recipes[tensor.recipe];
  const bool on_device = tensor.device_step != nullptr;
  const double step = on_device ? *tensor.device_step : recipe.step;
  const double lr = recipe.device_lr != nullptr ? *recipe.device_lr : recipe.options.lr;
  const double factor = tensor.factor != nullptr ? *tensor.factor : 1;
  Powers of_step{};
  if constexpr (is_adam(rule)) of_step = on_device ? powers(recipe.options, step) : recipe.powers;
  Coefficients<double> c = coefficients<rule>(recipe.options, lr, step, of_step, factor);
  if constexpr (!clamps) c.update_bound = 0;
  return {convert<Value>(c, Rounded<Value>{}), static_cast<uint32_t>(step)};
}

__device__ __forceinline__ bool is_skipped(const BatchedTensor& tensor) {
  return tensor.skip != nullptr && *tensor.skip != 0;
}

// The random bits of a tensor's elements, as formats.h says.
class Random {
 public:
  __device__ __forceinline__ Random(const Batch& batch, const BatchedTensor& tensor, uint32_t step)
      : seed_(batch.recipes[tensor.recipe].options.seed),
        first_group_(batch.recipes[tensor.recipe].first_block * static_cast<uint32_t>(kBlock / 8)),
        position_(tensor.position),
        step_(step) {}

  // Returns those of the 8 elements from 8 * group on.
  __device__ __forceinline__ Words4<uint32_t> group(Draw draw, int64_t group) const {
    return philox<Math>(Words4<uint32_t>{{first_group_ + static_cast<uint32_t>(group), position_,
                                          step_, static_cast<uint32_t>(draw)}},
                        seed_);
  }

  // Returns those of element i, in the lower half.
  __device__ __forceinline__ uint32_t element(Draw draw, int64_t i) const {
    const Words4<uint32_t> words = group(draw, i / 8);
    const uint32_t low = i & 2 ? words.word[1] : words.word[0];
    const uint32_t high = i & 2 ? words.word[3] : words.word[2];
    const uint32_t word = i & 4 ? high : low;
    return i & 1 ? word >> 16 : word & 0xffff;
  }

 private:
  uint64_t seed_;
  uint32_t first_group_, position_, step_;
};

}  // namespace memsave_ext::adam
