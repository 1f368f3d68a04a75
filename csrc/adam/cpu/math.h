// The Math that arithmetic.h, philox.h, formats.h and blockwise.h ask for, over vectors, for
// the instruction set whose target region this is included in.
#pragma once

#include "adam/arithmetic.h"
#include "vector/cpu.h"

namespace memsave_ext::adam::cpu::MEMSAVE_EXT_ISA {

namespace isa = vector::MEMSAVE_EXT_ISA;

using Floats = isa::Lanes<float>;
using Doubles = isa::Lanes<double>;
using Wide = isa::Vector<uint64_t, isa::kLanes<double>>;

struct Product {
  Wide high, low;  // of 32-bit numbers; only the lower half of each lane counts
};

struct Math {
  template <typename V>
  static MEMSAVE_EXT_INLINED V product(V a, V b) {
    V rounded = a * b;
#if defined(__x86_64__)
    asm("" : "+v"(rounded));  // keeps the compiler from fusing it with a sum
#elif defined(__aarch64__)
    asm("" : "+w"(rounded));
#endif
    return rounded;
  }

  template <typename V>
  static MEMSAVE_EXT_INLINED V fused(V a, V b, V c) {
    [[maybe_unused]] constexpr bool doubles = sizeof(a[0]) == 8;
#if MEMSAVE_EXT_VECTOR_BYTES == 64
    if constexpr (doubles) return (V)_mm512_fmadd_pd((__m512d)a, (__m512d)b, (__m512d)c);
    if constexpr (!doubles) return (V)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif MEMSAVE_EXT_VECTOR_BYTES == 32
    if constexpr (doubles) return (V)_mm256_fmadd_pd((__m256d)a, (__m256d)b, (__m256d)c);
    if constexpr (!doubles) return (V)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
    return a * b + c;
#endif
  }

  template <typename V>
  static MEMSAVE_EXT_INLINED V square_root(V v) {
    constexpr bool doubles = sizeof(v[0]) == 8;
#if MEMSAVE_EXT_VECTOR_BYTES == 64
    if constexpr (doubles) return (V)_mm512_maskz_sqrt_pd(0xff, (__m512d)v);
    if constexpr (!doubles) return (V)_mm512_maskz_sqrt_ps(isa::kAll, (__m512)v);
#elif MEMSAVE_EXT_VECTOR_BYTES == 32
    if constexpr (doubles) return (V)_mm256_sqrt_pd((__m256d)v);
    if constexpr (!doubles) return (V)_mm256_sqrt_ps((__m256)v);
#elif defined(__x86_64__)
    if constexpr (doubles) return (V)_mm_sqrt_pd((__m128d)v);
    if constexpr (!doubles) return (V)_mm_sqrt_ps((__m128)v);
#else
    constexpr int lanes = sizeof(V) / sizeof(v[0]);
    for (int i = 0; i < lanes; ++i) v[i] = doubles ? __builtin_sqrt(v[i]) : __builtin_sqrtf(v[i]);
    return v;
#endif
  }

  template <typename V>
  static MEMSAVE_EXT_INLINED V quotient(V a, V b) {
    return a / b;
  }

  template <typename V>
  static MEMSAVE_EXT_INLINED V maximum(V a, V b) {
    const V larger = a > b ? a : b;
    return a != a ? a : larger;
  }

  static MEMSAVE_EXT_INLINED Floats smaller(Floats a, Floats b) {
#if MEMSAVE_EXT_VECTOR_BYTES == 64
    return (Floats)_mm512_maskz_min_ps(isa::kAll, (__m512)a, (__m512)b);
#elif MEMSAVE_EXT_VECTOR_BYTES == 32
    return (Floats)_mm256_min_ps((__m256)a, (__m256)b);
#else
    return a < b ? a : b;
#endif
  }

  static MEMSAVE_EXT_INLINED Floats larger(Floats a, Floats b) {
#if MEMSAVE_EXT_VECTOR_BYTES == 64
    return (Floats)_mm512_maskz_max_ps(isa::kAll, (__m512)a, (__m512)b);
#elif MEMSAVE_EXT_VECTOR_BYTES == 32
    return (Floats)_mm256_max_ps((__m256)a, (__m256)b);
#else
    return a > b ? a : b;
#endif
  }

  // Both return their second argument where either is NaN.
  static MEMSAVE_EXT_INLINED Floats clamped(Floats v, Floats bound) {
    return larger(-bound, smaller(bound, v));
  }

  static MEMSAVE_EXT_INLINED isa::Bits bits(Floats v) { return (isa::Bits)v; }
  static MEMSAVE_EXT_INLINED Floats from_bits(isa::Bits bits) { return (Floats)bits; }
  static MEMSAVE_EXT_INLINED isa::Bits number_bits(Floats v) {
    return v != v ? isa::Bits{} + 0x7fc00000u : (isa::Bits)v;
  }
  static MEMSAVE_EXT_INLINED isa::Bits signed_upper(isa::Bits bits) {
    return (isa::Bits)((isa::Vector<int32_t, isa::kLanes<float>>)bits >> 16);
  }

  // Rounds numbers below 2^22.
  static MEMSAVE_EXT_INLINED isa::Bits nearest(Floats v) {
    constexpr float one_is_last_bit = 8388608;
    return bits(v + one_is_last_bit) ^ bits(Floats{} + one_is_last_bit);
  }

  static MEMSAVE_EXT_INLINED isa::Bits truncated(Floats v) {
    return (isa::Bits) __builtin_convertvector(v, Integers);
  }

  // Returns the integers, and 0 where v is 0.
  static MEMSAVE_EXT_INLINED isa::Bits zero_where_zero(Floats v, isa::Bits integers) {
#if MEMSAVE_EXT_VECTOR_BYTES == 64
    const __mmask16 kept = _mm512_cmp_ps_mask((__m512)v, _mm512_setzero_ps(), _CMP_NEQ_UQ);
    return (isa::Bits)_mm512_maskz_mov_epi32(kept, (__m512i)integers);
#else
    return (isa::Bits)(v != Floats{}) & integers;
#endif
  }

  static MEMSAVE_EXT_INLINED Floats number(isa::Bits integers) {
    return __builtin_convertvector((Integers)integers, Floats);
  }

  static constexpr bool kMultipliesBits = false;
#if MEMSAVE_EXT_VECTOR_BYTES >= 32
  static constexpr bool kLooksUp = true;
#else
  static constexpr bool kLooksUp = false;
#endif

  // Returns the numbers in a table at the lowest bits of each index: 4 bits, or 3 of a table of 8.
  template <int size>
  static MEMSAVE_EXT_INLINED Floats look_up([[maybe_unused]] const float (&table)[size],
                                            isa::Bits index) {
    static_assert(size == 16 || size == 8);
#if MEMSAVE_EXT_VECTOR_BYTES == 64
    __m512 numbers;
    if constexpr (size == 16) numbers = _mm512_loadu_ps(table);
    if constexpr (size == 8) {
      numbers = _mm512_maskz_broadcast_f32x8(isa::kAll, _mm256_loadu_ps(table));
    }
    return (Floats)_mm512_maskz_permutexvar_ps(isa::kAll, (__m512i)index, numbers);
#elif MEMSAVE_EXT_VECTOR_BYTES == 32
    const __m256 low = _mm256_permutevar8x32_ps(_mm256_loadu_ps(table), (__m256i)index);
    if constexpr (size == 8) return (Floats)low;
    const __m256 high = _mm256_permutevar8x32_ps(_mm256_loadu_ps(table + size - 8), (__m256i)index);
    return (Floats)_mm256_blendv_ps(low, high, (__m256)(index << 28));  // by the 4th bit
#else
    return (Floats)index;
#endif
  }

  // Returns a third of how much the exponent of a number from 0 to 1 is above `least`, or 0 where
  // it is below. least: from 106 on. Only the upper 16 bits of each lane count, which are 128 times
  // the exponent and 7 bits more: they are divided by 3 * 128 as a product.
  template <int least>
  static MEMSAVE_EXT_INLINED isa::Bits thirds_of_exponent(Floats v) {
    static_assert(least >= 106);
    [[maybe_unused]] constexpr int below = least * 128 << 16, factor = 10923 << 16;  // 2^22 / 384
#if MEMSAVE_EXT_VECTOR_BYTES == 64
    const __m512i above = _mm512_subs_epu16((__m512i)v, _mm512_set1_epi32(below));
    return (isa::Bits)_mm512_mulhi_epu16(above, _mm512_set1_epi32(factor)) >> 22;
#elif MEMSAVE_EXT_VECTOR_BYTES == 32
    const __m256i above = _mm256_subs_epu16((__m256i)v, _mm256_set1_epi32(below));
    return (isa::Bits)_mm256_mulhi_epu16(above, _mm256_set1_epi32(factor)) >> 22;
#else
    return (isa::Bits)v;
#endif
  }

  // Shuffles move the upper halves down, because shifts compete with multiplications.
  static MEMSAVE_EXT_INLINED Product multiply(uint32_t a, Wide b) {
#if MEMSAVE_EXT_VECTOR_BYTES == 64
    const __m512i product = _mm512_maskz_mul_epu32(0xff, _mm512_set1_epi64(a), (__m512i)b);
    return {(Wide)_mm512_maskz_shuffle_epi32(isa::kAll, product, _MM_PERM_DDBB), (Wide)product};
#elif MEMSAVE_EXT_VECTOR_BYTES == 32
    const __m256i product = _mm256_mul_epu32(_mm256_set1_epi64x(a), (__m256i)b);
    return {(Wide)_mm256_shuffle_epi32(product, 0xf5), (Wide)product};
#elif defined(__x86_64__)
    const __m128i product = _mm_mul_epu32(_mm_set1_epi64x(a), (__m128i)b);
    return {(Wide)_mm_shuffle_epi32(product, 0xf5), (Wide)product};
#else
    const Wide product = (b & 0xffffffffu) * a;
    return {product >> 32, product};
#endif
  }

 private:
  using Integers = isa::Vector<int32_t, isa::kLanes<float>>;
};

}  // namespace memsave_ext::adam::cpu::MEMSAVE_EXT_ISA
