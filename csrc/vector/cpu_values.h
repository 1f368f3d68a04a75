// Vectors of float or double, and how half and bfloat16 become and leave their values.
//
// Included first by vector/cpu.h, inside the same target region.
#include "vector/types.h"

namespace memsave_ext::vector::MEMSAVE_EXT_ISA {

#define MEMSAVE_EXT_INLINED __attribute__((always_inline))

template <typename T, int lanes>
struct VectorOf {
  typedef T type __attribute__((vector_size(lanes * sizeof(T))));
};
template <typename T, int lanes>
using Vector = typename VectorOf<T, lanes>::type;

template <typename Storage>
constexpr int kLanes = MEMSAVE_EXT_VECTOR_BYTES / sizeof(ValueOf<Storage>);
template <typename Storage>
using Lanes = Vector<ValueOf<Storage>, kLanes<Storage>>;
using Bits = Vector<uint32_t, kLanes<float>>;  // of floats

template <typename V, typename T>
MEMSAVE_EXT_INLINED inline V broadcast(T value) {
  return V{} + value;
}

template <typename V>
MEMSAVE_EXT_INLINED inline V load_raw(const void* from) {
  V v;
  __builtin_memcpy(&v, from, sizeof(v));
  return v;
}

// gcc 12 warns of uninitialised values in the unmasked AVX-512 conversions.
constexpr uint16_t kAll = 0xffff;

// Loads as many 16-bit values as a vector has floats.
MEMSAVE_EXT_INLINED inline Bits load_halves(const void* from) {
#if MEMSAVE_EXT_VECTOR_BYTES == 64
  return (Bits)_mm512_maskz_cvtepu16_epi32(kAll, load_raw<__m256i>(from));
#elif MEMSAVE_EXT_VECTOR_BYTES == 32
  return (Bits)_mm256_cvtepu16_epi32(load_raw<__m128i>(from));
#else
  return __builtin_convertvector(load_raw<Vector<uint16_t, kLanes<float>>>(from), Bits);
#endif
}

// The lower 16 bits of each lane, whose upper bits must be 0.
MEMSAVE_EXT_INLINED inline auto narrow_halves(Bits bits) {
#if MEMSAVE_EXT_VECTOR_BYTES == 64
  return _mm512_maskz_cvtepi32_epi16(kAll, (__m512i)bits);
#elif MEMSAVE_EXT_VECTOR_BYTES == 32
  const __m256i packed = _mm256_packus_epi32((__m256i)bits, (__m256i)bits);
  return _mm256_castsi256_si128(_mm256_permute4x64_epi64(packed, 0x08));
#else
  return __builtin_convertvector(bits, Vector<uint16_t, kLanes<float>>);
#endif
}

template <typename Storage>
MEMSAVE_EXT_INLINED inline Lanes<Storage> load(const Storage* from) {
  [[maybe_unused]] constexpr int lanes = kLanes<Storage>;
  if constexpr (std::is_same_v<Storage, Half>) {
#if MEMSAVE_EXT_VECTOR_BYTES == 64
    return (Lanes<Storage>)_mm512_maskz_cvtph_ps(kAll, load_raw<__m256i>(from));
#elif MEMSAVE_EXT_VECTOR_BYTES == 32
    return (Lanes<Storage>)_mm256_cvtph_ps(load_raw<__m128i>(from));
#else
    Lanes<Storage> v;
    for (int i = 0; i < lanes; ++i) v[i] = c10::Half(from[i].bits, c10::Half::from_bits());
    return v;
#endif
  } else if constexpr (std::is_same_v<Storage, BFloat16>) {
    return (Lanes<Storage>)(load_halves(from) << 16);
  } else {
    return load_raw<Lanes<Storage>>(from);
  }
}

// Rounds to bfloat16, to nearest even.
MEMSAVE_EXT_INLINED inline Bits bfloat16_bits(Lanes<float> v) {
  const Bits bits = (Bits)v;
  const Bits rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  return v != v ? Bits{} + 0x7fc0u : rounded;
}

// A value as it is stored, rounded to nearest even.
template <typename Storage>
MEMSAVE_EXT_INLINED inline auto narrow(Lanes<Storage> v) {
  [[maybe_unused]] constexpr int lanes = kLanes<Storage>;
  if constexpr (std::is_same_v<Storage, Half>) {
#if MEMSAVE_EXT_VECTOR_BYTES == 64
    return _mm512_maskz_cvtps_ph(kAll, (__m512)v, _MM_FROUND_TO_NEAREST_INT);
#elif MEMSAVE_EXT_VECTOR_BYTES == 32
    return _mm256_cvtps_ph((__m256)v, _MM_FROUND_TO_NEAREST_INT);
#else
    Vector<uint16_t, lanes> bits;
    for (int i = 0; i < lanes; ++i) bits[i] = c10::Half(v[i]).x;
    return bits;
#endif
  } else if constexpr (std::is_same_v<Storage, BFloat16>) {
    return narrow_halves(bfloat16_bits(v));
  } else {
    return v;
  }
}

#if MEMSAVE_EXT_VECTOR_BYTES == 32
// Two vectors of 16-bit values as they are stored.
template <typename Storage>
MEMSAVE_EXT_INLINED inline __m256i narrow_both(Lanes<Storage> low, Lanes<Storage> high) {
  if constexpr (std::is_same_v<Storage, BFloat16>) {
    const __m256i packed =
        _mm256_packus_epi32((__m256i)bfloat16_bits(low), (__m256i)bfloat16_bits(high));
    return _mm256_permute4x64_epi64(packed, 0xd8);
  } else {
    return _mm256_set_m128i(narrow<Storage>(high), narrow<Storage>(low));
  }
}
#endif

template <typename V>
MEMSAVE_EXT_INLINED inline double total(V v) {
  using T = std::remove_reference_t<decltype(v[0])>;
  if constexpr (sizeof(V) > 16) {
    Vector<T, sizeof(V) / sizeof(T) / 2> halves[2];
    __builtin_memcpy(halves, &v, sizeof(v));
    return total(halves[0] + halves[1]);
  } else if constexpr (sizeof(T) == 4) {
    return (static_cast<double>(v[0]) + v[1]) + (static_cast<double>(v[2]) + v[3]);
  } else {
    return v[0] + v[1];
  }
}

}  // namespace memsave_ext::vector::MEMSAVE_EXT_ISA
