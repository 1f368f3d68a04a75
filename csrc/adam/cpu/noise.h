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
  Wide wide[kCount];

  MEMSAVE_EXT_INLINED SeveralWides operator^(const SeveralWides& other) const {
    SeveralWides results;
    for (int i = 0; i < kCount; ++i) results.wide[i] = wide[i] ^ other.wide[i];
    return results;
  }

  MEMSAVE_EXT_INLINED SeveralWides operator^(uint32_t other) const {
    SeveralWides results;
    for (int i = 0; i < kCount; ++i) results.wide[i] = wide[i] ^ other;
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
      const Product product = Math::multiply(a, b.wide[i]);
      products.high.wide[i] = product.high;
      products.low.wide[i] = product.low;
    }
    return products;
  }
};

// 16 random bits for each of kBlock elements. The index of the first is a multiple of 8.
struct alignas(64) Noise {
  uint16_t bits[kBlock];
};

// The four words of each lane side by side, in two vectors: the first has the lower lane of each
// pair of lanes, the second the upper.
struct Drawn {
  Wide parts[2];
};

MEMSAVE_EXT_INLINED inline Drawn side_by_side(const Words4<Wide>& words) {
  const auto& word = words.word;
#if MEMSAVE_EXT_VECTOR_BYTES == 64
  const __m512 a = _mm512_maskz_shuffle_ps(isa::kAll, (__m512)word[0], (__m512)word[1], 0x88);
  const __m512 b = _mm512_maskz_shuffle_ps(isa::kAll, (__m512)word[2], (__m512)word[3], 0x88);
  return {{(Wide)_mm512_maskz_shuffle_ps(isa::kAll, a, b, 0x88),
           (Wide)_mm512_maskz_shuffle_ps(isa::kAll, a, b, 0xdd)}};
#elif MEMSAVE_EXT_VECTOR_BYTES == 32
  const __m256 a = _mm256_shuffle_ps((__m256)word[0], (__m256)word[1], 0x88);
  const __m256 b = _mm256_shuffle_ps((__m256)word[2], (__m256)word[3], 0x88);
  return {{(Wide)_mm256_shuffle_ps(a, b, 0x88), (Wide)_mm256_shuffle_ps(a, b, 0xdd)}};
#else
  const Wide a = (word[0] & 0xffffffffu) | word[1] << 32,
             b = (word[2] & 0xffffffffu) | word[3] << 32;
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
  uint16_t* to = noise.bits;
  for (int64_t i = begin; i < end; i += 8 * lanes * Word::kCount) {
    Words4<Word> words;
    for (int k = 0; k < Word::kCount; ++k) {
      words.word[0].wide[k] = counters + static_cast<uint64_t>((first + i) / 8 + k * lanes);
      words.word[1].wide[k] = position;
      words.word[2].wide[k] = step;
      words.word[3].wide[k] = last;
    }
    words = philox<SeveralMath>(words, seed);
    for (int k = 0; k < Word::kCount; ++k) {
      const auto& word = words.word;
      const Drawn drawn =
          side_by_side({{word[0].wide[k], word[1].wide[k], word[2].wide[k], word[3].wide[k]}});
      for (const Wide& part : drawn.parts) {
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
