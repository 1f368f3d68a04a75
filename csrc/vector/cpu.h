// Loads and stores of vectors: of whole ones and of parts, through the caches or past them.
//
// Included inside the target region of an instruction set (target_*.h), which defines
// MEMSAVE_EXT_ISA, the namespace, and MEMSAVE_EXT_VECTOR_BYTES: nothing here may be shared between
// instruction sets.
#include "vector/cpu_values.h"

namespace memsave_ext::vector::MEMSAVE_EXT_ISA {

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

}  // namespace memsave_ext::vector::MEMSAVE_EXT_ISA
