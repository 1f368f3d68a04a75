// Blockwise 8-bit states of a part of a tensor, for the instruction set whose target region this is
// included in. States of other formats: states.h.
#pragma once

#include "adam/blockwise_8bit.h"
#include "adam/cpu/states.h"

namespace memsave_ext::adam::cpu::MEMSAVE_EXT_ISA {

// Returns the largest lane; none is negative.
template <typename V>
MEMSAVE_EXT_INLINED inline uint32_t largest(V v) {
  constexpr int lanes = sizeof(V) / sizeof(v[0]);
  if constexpr (lanes == 1) {
    return static_cast<uint32_t>(v[0]);
  } else {
    isa::Vector<int32_t, lanes / 2> halves[2];
    __builtin_memcpy(halves, &v, sizeof(v));
    return largest(halves[0] > halves[1] ? halves[0] : halves[1]);
  }
}

// One 8-bit moment, a block at a time: exp_avg, or with `is_root` exp_avg_sq, which is coded as its
// square root. `values` has the block's decoded numbers, and then its new ones (of exp_avg_sq: the
// roots) until all are known, and with them their scale.
template <bool is_root>
struct Coded {
  static constexpr int lanes = isa::kLanes<float>;
  using Integers = isa::Vector<int32_t, lanes>;
  using Numbers = Several<Floats>;
  using Words = Several<isa::Bits>;
  static constexpr int kGroup = lanes * Numbers::kCount;
  static_assert(kBlock % kGroup == 0);

  uint8_t* codes;
  float* scales;
  uint8_t* block;  // codes of the open block
  Floats scale;    // of these codes
  Floats inverse;  // of the new scale
  bool finite;     // whether the new scale is finite
  alignas(64) float values[kBlock];
  uint8_t last[kBlock];  // codes of a block that is not whole

  MEMSAVE_EXT_INLINED Coded(void* codes, float* scales)
      : codes(static_cast<uint8_t*>(codes)), scales(scales) {}

  MEMSAVE_EXT_INLINED void open(int64_t from, int64_t to) {
    for (int64_t i = 0; i < kBlock; i += 64) prefetch(codes + from + i);
    block = codes + from;
    if (to - from < kBlock) {
      __builtin_memset(last, 0, sizeof(last));
      __builtin_memcpy(last, block, to - from);
      block = last;
    }
    scale = Floats{} + scales[from / kBlock];
  }

  // Called in the order of offsets. A group is decoded when its first offset is loaded: between
  // updates, whose divisions take the time.
  MEMSAVE_EXT_INLINED Floats load(int64_t offset) {
    if (offset % kGroup == 0) {
      Words words;
      for (int k = 0; k < words.kCount; ++k) {
        words.of[k] = isa::load_bytes(block + offset + k * lanes);
      }
      const Numbers numbers = decode(words);
      for (int k = 0; k < numbers.kCount; ++k) keep(offset + k * lanes, numbers.of[k]);
    }
    return kept(offset);
  }

  template <typename Size>
  MEMSAVE_EXT_INLINED void store(int64_t offset, Floats v, Size size) {
    keep(offset, isa::keep(v, size));
  }

  // Sets the block's new scale. Called after its last value is stored.
  MEMSAVE_EXT_INLINED void find_scale(int64_t from, int64_t to) {
    uint32_t bits = largest_magnitude(to - from);
    finite = bits < 0x7f800000u;
    if (!finite) bits = 0x7fc00000u;  // NaN: all of the block will be NaN
    float& new_scale = scales[from / kBlock];
    __builtin_memcpy(&new_scale, &bits, sizeof(bits));
    inverse = inverse_scale<Math>(Floats{} + new_scale);
  }

  // Encodes the block with its new scale.
  MEMSAVE_EXT_INLINED void close(int64_t from, int64_t to, const Noise& noise) {
    if (!finite) {
      __builtin_memset(codes + from, 0, to - from);
      return;
    }
    for (int64_t i = 0; i < to - from; i += kGroup) {
      Numbers numbers;
      Words random;
      for (int k = 0; k < numbers.kCount; ++k) {
        numbers.of[k] = kept(i + k * lanes);
        random.of[k] = random_bits(noise.of + i + k * lanes);
      }
      const Words words = encode(numbers, random);
      for (int k = 0; k < words.kCount; ++k) isa::store_bytes(block + i + k * lanes, words.of[k]);
    }
    if (block == last) __builtin_memcpy(codes + from, last, to - from);
  }

 private:
  MEMSAVE_EXT_INLINED Floats kept(int64_t offset) const { return isa::load(values + offset); }

  // Returns the bits of the largest magnitude. Bits are in the order of the numbers, and those of
  // infinity and NaN are larger.
  MEMSAVE_EXT_INLINED uint32_t largest_magnitude(int64_t count) const {
    Integers maximum{};
    for (int64_t i = 0; i < count; i += lanes) {
      const Integers magnitudes = (Integers)kept(i) & 0x7fffffff;
      maximum = magnitudes > maximum ? magnitudes : maximum;
    }
    return largest(maximum);
  }

  MEMSAVE_EXT_INLINED void keep(int64_t offset, Floats v) {
    __builtin_memcpy(values + offset, &v, sizeof(v));
  }

  MEMSAVE_EXT_INLINED Numbers decode(const Words& words) const {
    if constexpr (!is_root) {
      return decode_exp_avg<SeveralMath>(words, scale);
    } else {
      return decode_exp_avg_sq<SeveralMath>(words, scale);
    }
  }

  MEMSAVE_EXT_INLINED Words encode(const Numbers& numbers, const Words& random) const {
    if constexpr (!is_root) {
      return encode_exp_avg<SeveralMath>(numbers, inverse, random);
    } else {
      return encode_root<SeveralMath>(numbers, inverse, random);
    }
  }
};

// A chunk is a block.
struct InBlocks {
  using V = Floats;
  static constexpr bool kAmsgrad = false;
  static constexpr bool kClamps = true;
  static constexpr bool kInBlocks = true;
  static constexpr bool kRandom = false;  // close() draws the bits itself

  const Item& item;
  Coded<false> exp_avg;
  Coded<true> exp_avg_sq;

  MEMSAVE_EXT_INLINED explicit InBlocks(const Item& item)
      : item(item),
        exp_avg(item.exp_avg, item.exp_avg_scale),
        exp_avg_sq(item.exp_avg_sq, item.exp_avg_sq_scale) {}

  MEMSAVE_EXT_INLINED void prefetch_at(int64_t) const {}

  MEMSAVE_EXT_INLINED void open(int64_t from, int64_t to) {
    exp_avg.open(from, to);
    exp_avg_sq.open(from, to);
  }

  template <typename Size>
  MEMSAVE_EXT_INLINED void load(Values<V>& x, int64_t, int64_t offset, Size) {
    x.exp_avg = exp_avg.load(offset);
    x.exp_avg_sq = exp_avg_sq.load(offset);
  }

  template <typename Size>
  MEMSAVE_EXT_INLINED void store(const Values<V>& x, int64_t, int64_t offset, Size size,
                                 const Noise&) {
    exp_avg.store(offset, x.exp_avg, size);
    exp_avg_sq.store(offset, Math::square_root(x.exp_avg_sq), size);
  }

  // Random bits are drawn between finding the scales and encoding, which waits for the scales.
  MEMSAVE_EXT_INLINED void close(int64_t from, int64_t to, const Noise&) {
    exp_avg.find_scale(from, to);
    exp_avg_sq.find_scale(from, to);
    if constexpr (kRandomMoments) draw(item, Draw::kMoments, from, to, noise);
    exp_avg.close(from, to, noise);
    exp_avg_sq.close(from, to, noise);
  }

 private:
  Noise noise;
};

template <StateFormat states, typename Storage>
using Moments = std::conditional_t<
    row(states).at_random, Short<StateBits<states>, true, Element::kNone>,
    Nearest<std::conditional_t<row(states).moments == Element::kFloat, float, Storage>>>;

template <StateFormat states, typename Storage, bool amsgrad>
using States = std::conditional_t<(row(states).block > 0), InBlocks,
                                  Separate<Moments<states, Storage>, amsgrad>>;

}  // namespace memsave_ext::adam::cpu::MEMSAVE_EXT_ISA
