// Vectors of float or double: loads and stores of whole ones and of parts, through the caches or
// past them; and how half, bfloat16 and bytes become and leave their values.
//
// Included inside the target region of an instruction set (target_begin.h), which defines
// MEMSAVE_EXT_ISA, the namespace, and MEMSAVE_EXT_VECTOR_BYTES: nothing here may be shared between
// instruction sets. It is not at::vec, with which a loop like BatchNorm's forward takes 1.22
// to 1.68 times as long, and a NaN becomes the bfloat16 0xffff instead of 0x7fc0.
#pragma once

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

// How much of a vector is loaded or stored.
struct Whole {};
struct Streamed {};  // a whole vector, stored past the caches
struct Part {
  int64_t lanes;
};
// A whole vector that ends with a row. Its values but the last `lanes` were taken before: they are
// written again, and left out of sums.
struct Last {
  int64_t lanes;
};

MEMSAVE_EXT_INLINED inline uint16_t mask(Part part) {
  return static_cast<uint16_t>((1u << part.lanes) - 1);
}

template <typename Storage>
MEMSAVE_EXT_INLINED inline Lanes<Storage> load(const Storage* from, Whole) {
  return load(from);
}

template <typename Storage>
MEMSAVE_EXT_INLINED inline Lanes<Storage> load(const Storage* from, Streamed) {
  return load(from);
}

template <typename Storage>
MEMSAVE_EXT_INLINED inline Lanes<Storage> load(const Storage* from, Last) {
  return load(from);
}

// A mask: all ones in the lanes of the part.
template <typename T, int lanes>
MEMSAVE_EXT_INLINED inline auto lanes_of(Part part) {
  using Integer = std::conditional_t<sizeof(T) == 8, int64_t, int32_t>;
  Vector<Integer, lanes> index;
  for (int i = 0; i < lanes; ++i) index[i] = i;
  return index < static_cast<Integer>(part.lanes);
}

template <typename V>
MEMSAVE_EXT_INLINED inline V keep(V v, Whole) {
  return v;
}

template <typename V>
MEMSAVE_EXT_INLINED inline V keep(V v, Part part) {
  using T = std::remove_reference_t<decltype(v[0])>;
  return lanes_of<T, sizeof(V) / sizeof(T)>(part) ? v : V{};
}

template <typename V>
MEMSAVE_EXT_INLINED inline V keep(V v, Last last) {
  using T = std::remove_reference_t<decltype(v[0])>;
  constexpr int lanes = sizeof(V) / sizeof(T);
  return lanes_of<T, lanes>(Part{lanes - last.lanes}) ? V{} : v;
}

template <typename Storage>
MEMSAVE_EXT_INLINED inline void copy(Storage* to, const Storage* from, Part part) {
  // What gcc cannot know, and would warn of.
  if (part.lanes < 0 || part.lanes > kLanes<Storage>) __builtin_unreachable();
  for (int step = kLanes<Storage>; step > 0; step /= 2) {
    if (!(part.lanes & step)) continue;
    __builtin_memcpy(to, from, step * sizeof(Storage));
    to += step;
    from += step;
  }
}

// Loads a part of a vector; the lanes past it are 0.
template <typename Storage>
MEMSAVE_EXT_INLINED inline Lanes<Storage> load(const Storage* from, Part part) {
#if MEMSAVE_EXT_VECTOR_BYTES == 64
  if constexpr (sizeof(Storage) == 2) {
    const __m256i whole = _mm256_maskz_loadu_epi16(mask(part), from);
    return load(reinterpret_cast<const Storage*>(&whole));
  } else if constexpr (sizeof(Storage) == 4) {
    return (Lanes<Storage>)_mm512_maskz_loadu_ps(mask(part), from);
  } else {
    return (Lanes<Storage>)_mm512_maskz_loadu_pd(mask(part), from);
  }
#elif MEMSAVE_EXT_VECTOR_BYTES == 32
  if constexpr (std::is_same_v<Storage, float>) {
    return (Lanes<Storage>)_mm256_maskload_ps(from, (__m256i)lanes_of<float, 8>(part));
  }
  if constexpr (std::is_same_v<Storage, double>) {
    return (Lanes<Storage>)_mm256_maskload_pd(from, (__m256i)lanes_of<double, 4>(part));
  }
#endif
  Storage whole[kLanes<Storage>] = {};
  copy(whole, from, part);
  return load(whole);
}

template <typename Storage>
MEMSAVE_EXT_INLINED inline void store(Storage* to, Lanes<Storage> v, Whole) {
  const auto stored = narrow<Storage>(v);
  __builtin_memcpy(to, &stored, sizeof(stored));
}

template <typename Storage>
MEMSAVE_EXT_INLINED inline void store(Storage* to, Lanes<Storage> v, Last) {
  store(to, v, Whole{});
}

template <typename Storage>
MEMSAVE_EXT_INLINED inline void store(Storage* to, Lanes<Storage> v, Part part) {
#if MEMSAVE_EXT_VECTOR_BYTES == 64
  if constexpr (sizeof(Storage) == 2) {
    _mm256_mask_storeu_epi16(to, mask(part), (__m256i)narrow<Storage>(v));
  } else if constexpr (sizeof(Storage) == 4) {
    _mm512_mask_storeu_ps(to, mask(part), (__m512)v);
  } else {
    _mm512_mask_storeu_pd(to, mask(part), (__m512d)v);
  }
#else
#if MEMSAVE_EXT_VECTOR_BYTES == 32
  if constexpr (std::is_same_v<Storage, float>) {
    return _mm256_maskstore_ps(to, (__m256i)lanes_of<float, 8>(part), (__m256)v);
  }
  if constexpr (std::is_same_v<Storage, double>) {
    return _mm256_maskstore_pd(to, (__m256i)lanes_of<double, 4>(part), (__m256d)v);
  }
#endif
  Storage whole[kLanes<Storage>];
  store(whole, v, Whole{});
  copy(to, whole, part);
#endif
}

MEMSAVE_EXT_INLINED inline void store_halves(void* to, Bits bits, Whole) {
  const auto stored = narrow_halves(bits);
  __builtin_memcpy(to, &stored, sizeof(stored));
}

MEMSAVE_EXT_INLINED inline void store_halves(void* to, Bits bits, Part part) {
  BFloat16 whole[kLanes<float>];
  store_halves(whole, bits, Whole{});
  copy(static_cast<BFloat16*>(to), whole, part);
}

// Stores past the caches; `to` is aligned to the size of what is stored.
template <typename Storage>
MEMSAVE_EXT_INLINED inline void store(Storage* to, Lanes<Storage> v, Streamed) {
  const auto stored = narrow<Storage>(v);
#if MEMSAVE_EXT_VECTOR_BYTES == 64
  if constexpr (sizeof(stored) == 64) {
    return _mm512_stream_si512(reinterpret_cast<__m512i*>(to), (__m512i)stored);
  }
#endif
#if MEMSAVE_EXT_VECTOR_BYTES >= 32
  if constexpr (sizeof(stored) == 32) {
    return _mm256_stream_si256(reinterpret_cast<__m256i*>(to), (__m256i)stored);
  }
#endif
#if defined(__x86_64__)
  if constexpr (sizeof(stored) == 16) {
    return _mm_stream_si128(reinterpret_cast<__m128i*>(to), (__m128i)stored);
  }
#endif
  __builtin_memcpy(to, &stored, sizeof(stored));
}

// Stores some vectors, one after the other; with AVX2 those of 16-bit values by twos, which takes
// fewer instructions and fills a line in half as many stores.
template <typename Storage, int count, typename Size>
MEMSAVE_EXT_INLINED inline void store_all(Storage* to, const Lanes<Storage> (&v)[count],
                                          Size size) {
#if MEMSAVE_EXT_VECTOR_BYTES == 32
  if constexpr (sizeof(Storage) == 2 && count % 2 == 0) {
    for (int i = 0; i < count; i += 2) {
      auto* at = reinterpret_cast<__m256i*>(to + i * kLanes<Storage>);
      const __m256i both = narrow_both<Storage>(v[i], v[i + 1]);
      std::is_same_v<Size, Streamed> ? _mm256_stream_si256(at, both)
                                     : _mm256_storeu_si256(at, both);
    }
    return;
  }
#endif
  for (int i = 0; i < count; ++i) store(to + i * kLanes<Storage>, v[i], size);
}

// Loads bytes, one into each lane.
MEMSAVE_EXT_INLINED inline Bits load_bytes(const uint8_t* from) {
#if MEMSAVE_EXT_VECTOR_BYTES == 64
  return (Bits)_mm512_maskz_cvtepu8_epi32(kAll, load_raw<__m128i>(from));
#elif MEMSAVE_EXT_VECTOR_BYTES == 32
  return (Bits)_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from)));
#else
  return __builtin_convertvector(load_raw<Vector<uint8_t, kLanes<float>>>(from), Bits);
#endif
}

MEMSAVE_EXT_INLINED inline Bits load_bytes(const uint8_t* from, Whole) { return load_bytes(from); }

MEMSAVE_EXT_INLINED inline Bits load_bytes(const uint8_t* from, Part part) {
  uint8_t whole[kLanes<float>] = {};
  copy(whole, from, part);
  return load_bytes(whole);
}

MEMSAVE_EXT_INLINED inline void store_bytes(uint8_t* to, Bits bits) {
#if MEMSAVE_EXT_VECTOR_BYTES == 64
  const __m128i stored = _mm512_maskz_cvtepi32_epi8(kAll, (__m512i)bits);
  __builtin_memcpy(to, &stored, sizeof(stored));
#elif MEMSAVE_EXT_VECTOR_BYTES == 32
  const __m256i halves = _mm256_packus_epi32((__m256i)bits, (__m256i)bits);
  const __m256i bytes = _mm256_packus_epi16(halves, halves);
  const __m128i high = _mm256_extracti128_si256(bytes, 1);
  const __m128i stored = _mm_unpacklo_epi32(_mm256_castsi256_si128(bytes), high);
  _mm_storel_epi64(reinterpret_cast<__m128i*>(to), stored);
#else
  const auto stored = __builtin_convertvector(bits, Vector<uint8_t, kLanes<float>>);
  __builtin_memcpy(to, &stored, sizeof(stored));
#endif
}

MEMSAVE_EXT_INLINED inline void store_bytes(uint8_t* to, Bits bits, Whole) {
  store_bytes(to, bits);
}

MEMSAVE_EXT_INLINED inline void store_bytes(uint8_t* to, Bits bits, Part part) {
  uint8_t whole[kLanes<float>];
  store_bytes(whole, bits);
  copy(to, whole, part);
}

// Stores the bytes of four vectors, whose lanes are from 0 to 255.
MEMSAVE_EXT_INLINED inline void store_bytes(uint8_t* to, const Bits (&of)[4]) {
#if MEMSAVE_EXT_VECTOR_BYTES == 64
  const __m512i first = _mm512_packus_epi32((__m512i)of[0], (__m512i)of[1]);
  const __m512i second = _mm512_packus_epi32((__m512i)of[2], (__m512i)of[3]);
  const __m512i packed = _mm512_packus_epi16(first, second);  // 4 bytes of each, 4 times
  const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  const __m512i stored = _mm512_maskz_permutexvar_epi32(kAll, order, packed);
#elif MEMSAVE_EXT_VECTOR_BYTES == 32
  const __m256i first = _mm256_packus_epi32((__m256i)of[0], (__m256i)of[1]);
  const __m256i second = _mm256_packus_epi32((__m256i)of[2], (__m256i)of[3]);
  const __m256i packed = _mm256_packus_epi16(first, second);  // 4 bytes of each, twice
  const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
  const __m256i stored = _mm256_permutevar8x32_epi32(packed, order);
#elif defined(__x86_64__)
  const __m128i first = _mm_packs_epi32((__m128i)of[0], (__m128i)of[1]);
  const __m128i second = _mm_packs_epi32((__m128i)of[2], (__m128i)of[3]);
  const __m128i stored = _mm_packus_epi16(first, second);
#else
  Vector<uint8_t, 4 * kLanes<float>> stored;
  for (int i = 0; i < 4 * kLanes<float>; ++i) {
    stored[i] = static_cast<uint8_t>(of[i / kLanes<float>][i % kLanes<float>]);
  }
#endif
  __builtin_memcpy(to, &stored, sizeof(stored));
}

}  // namespace memsave_ext::vector::MEMSAVE_EXT_ISA
