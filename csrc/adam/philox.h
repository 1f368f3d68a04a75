// Philox4x32-10, the counter-based generator of Salmon et al. 2011 ("Parallel random numbers: as
// easy as 1, 2, 3"): 128 random bits from a counter and a key.
#pragma once

#include <cstdint>

#include "vector/types.h"

namespace memsave_ext::adam {

template <typename Word>
struct Words4 {
  Word word[4];
};

// Word: uint32_t, a vector of uint32_t, or a vector of uint64_t whose lower halves count.
// Math::multiply(scalar, word) returns an object whose `high` and `low` are the halves of the
// 64-bit products.
template <typename Math, typename Word, typename Key>
MEMSAVE_EXT_INLINE Words4<Word> philox(Words4<Word> c, Key low, Key high) {
  for (int round = 0; round < 10; ++round) {
    const auto even = Math::multiply(0xD2511F53u, c.word[0]);
    const auto odd = Math::multiply(0xCD9E8D57u, c.word[2]);
    c = {{odd.high ^ c.word[1] ^ low, odd.low, even.high ^ c.word[3] ^ high, even.low}};
    low += 0x9E3779B9u;
    high += 0xBB67AE85u;
  }
  return c;
}

template <typename Math, typename Word>
MEMSAVE_EXT_INLINE Words4<Word> philox(Words4<Word> c, uint64_t seed) {
  return philox<Math>(c, static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32));
}

}  // namespace memsave_ext::adam
