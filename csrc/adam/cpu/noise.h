// The random bits of formats.h, for the instruction set whose target region this is included in.
#pragma once

#include "adam/cpu/math.h"
#include "adam/kernels.h"
#include "adam/philox.h"

namespace memsave_ext::adam::cpu::MEMSAVE_EXT_ISA {

// Several vectors as one: long chains of operations go through all of them side by side, and share
// constants.
struct SeveralWides {
  static constexpr int kCount = 4;
  Wide of[kCount];

  MEMSAVE_EXT_INLINED SeveralWides operator^(const SeveralWides& other) const {
    SeveralWides results;
    for (int i = 0; i < kCount; ++i) results.of[i] = of[i] ^ other.of[i];
    return results;
  }

  MEMSAVE_EXT_INLINED SeveralWides operator^(uint32_t other) const {
    SeveralWides results;
    for (int i = 0; i < kCount; ++i) results.of[i] = of[i] ^ other;
    return results;
  }
};

// The Math that philox.h asks for.
struct SeveralMath {
  struct Products {
    SeveralWides high, low;
  };

  static MEMSAVE_EXT_INLINED Products multiply(uint32_t a, const SeveralWides& b) {
    Products products;
    for (int i = 0; i < b.kCount; ++i) {
      const Product product = Math::multiply(a, b.of[i]);
      products.high.of[i] = product.high;
      products.low.of[i] = product.low;
    }
    return products;
  }
};

// 16 random bits for each of kBlock elements. The index of the first is a multiple of 8.
struct alignas(64) Noise {
  uint16_t of[kBlock];
};

// The four words of each lane side by side, in two vectors: the first has the lower lane of each
// pair of lanes, the second the upper.
struct Drawn {
  Wide of[2];
};

MEMSAVE_EXT_INLINED inline Drawn side_by_side(const Words4<Wide>& words) {
  const auto& of = words.of;
#if MEMSAVE_EXT_VECTOR_BYTES == 64
  const __m512 a = _mm512_maskz_shuffle_ps(isa::kAll, (__m512)of[0], (__m512)of[1], 0x88);
  const __m512 b = _mm512_maskz_shuffle_ps(isa::kAll, (__m512)of[2], (__m512)of[3], 0x88);
  return {{(Wide)_mm512_maskz_shuffle_ps(isa::kAll, a, b, 0x88),
           (Wide)_mm512_maskz_shuffle_ps(isa::kAll, a, b, 0xdd)}};
#elif MEMSAVE_EXT_VECTOR_BYTES == 32
  const __m256 a = _mm256_shuffle_ps((__m256)of[0], (__m256)of[1], 0x88);
  const __m256 b = _mm256_shuffle_ps((__m256)of[2], (__m256)of[3], 0x88);
  return {{(Wide)_mm256_shuffle_ps(a, b, 0x88), (Wide)_mm256_shuffle_ps(a, b, 0xdd)}};
#else
  const Wide a = (of[0] & 0xffffffffu) | of[1] << 32, b = (of[2] & 0xffffffffu) | of[3] << 32;
  return {{Wide{a[0], b[0]}, Wide{a[1], b[1]}}};
#endif
}

// Draws the bits of the elements from begin to end, and of a few after. Each lane has a counter, in
// such an order that side_by_side() puts the words in the order of elements, though no word leaves
// its 128 bits of a vector.
__attribute__((noinline, flatten)) inline void draw(const Item& item, Draw what, int64_t begin,
                                                    int64_t end, Noise& noise) {
  constexpr int lanes = sizeof(Wide) / 8;
  using Word = SeveralWides;
  static_assert(kBlock % (8 * lanes * Word::kCount) == 0);
  Wide counters;
  for (int i = 0; i < lanes; ++i) counters[i] = static_cast<uint64_t>(i % 2 * (lanes / 2) + i / 2);
  const Wide position = Wide{} + static_cast<uint64_t>(item.position);
  const Wide step = Wide{} + static_cast<uint64_t>(static_cast<uint32_t>(item.step));
  const Wide last = Wide{} + static_cast<uint64_t>(what);
  const uint64_t seed = item.options->seed;
  const int64_t first = item.first_block * kBlock;
  uint16_t* to = noise.of;
  for (int64_t i = begin; i < end; i += 8 * lanes * Word::kCount) {
    Words4<Word> words;
    for (int k = 0; k < Word::kCount; ++k) {
      words.of[0].of[k] = counters + static_cast<uint64_t>((first + i) / 8 + k * lanes);
      words.of[1].of[k] = position;
      words.of[2].of[k] = step;
      words.of[3].of[k] = last;
    }
    words = philox<SeveralMath>(words, seed);
    for (int k = 0; k < Word::kCount; ++k) {
      const auto& of = words.of;
      const Drawn drawn = side_by_side({{of[0].of[k], of[1].of[k], of[2].of[k], of[3].of[k]}});
      for (const Wide& part : drawn.of) {
        __builtin_memcpy(to, &part, sizeof(part));
        to += 4 * lanes;
      }
    }
  }
}

// Returns 16 random bits for each lane.
MEMSAVE_EXT_INLINED inline isa::Bits random_bits(const uint16_t* noise) {
  return isa::load_halves(noise);
}

}  // namespace memsave_ext::adam::cpu::MEMSAVE_EXT_ISA
