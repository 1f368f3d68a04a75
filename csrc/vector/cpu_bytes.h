// How vectors of integers are read from and written into bytes.
//
// Included after vector/cpu.h, inside the same target region.
#pragma once

namespace memsave_ext::vector::MEMSAVE_EXT_ISA {

// Loads bytes, one into each lane.
MEMSAVE_EXT_INLINED inline Bits load_bytes(const uint8_t* from) {
#if MEMSAVE_EXT_VECTOR_BYTES == 64
  return (Bits)_mm512_maskz_cvtepu8_epi32(kAll, load_raw<__m128i>(from));
#elif MEMSAVE_EXT_VECTOR_BYTES == 32
  return (Bits)_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from)));
#else
  return __builtin_convertvector(load_raw<Vector<uint8_t, kLanes<float> > >(from), Bits);
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
  const auto stored = __builtin_convertvector(bits, Vector<uint8_t, kLanes<float> >);
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
  Vector<uint8_t, 4 * kLanes<float> > stored;
  for (int i = 0; i < 4 * kLanes<float>; ++i) {
    stored[i] = static_cast<uint8_t>(of[i / kLanes<float>][i % kLanes<float>]);
  }
#endif
  __builtin_memcpy(to, &stored, sizeof(stored));
}

}  // namespace memsave_ext::vector::MEMSAVE_EXT_ISA
