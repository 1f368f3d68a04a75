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

}  // namespace memsave_ext::vector::MEMSAVE_EXT_ISA
