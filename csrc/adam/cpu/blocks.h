// Blockwise states of a part of a tensor, for the instruction set whose target region this is
// included in. States of other formats: states.h.
#pragma once

#include "adam/blockwise.h"
#include "adam/cpu/states.h"

namespace memsave_ext::adam::cpu::MEMSAVE_EXT_ISA {

// Returns the largest lane; none is negative.
template <typename V>
MEMSAVE_EXT_INLINED inline uint32_t largest(V v) {
  constexpr int lanes = sizeof(V) / sizeof(v[0]);
  if constexpr (lanes == 1) {
    return static_cast<uint32_t>(v[0]);
#if MEMSAVE_EXT_VECTOR_BYTES >= 32
  } else if constexpr (lanes == 4) {  // gcc compares the last ones by branches
    const __m128i pairs = _mm_max_epi32((__m128i)v, _mm_shuffle_epi32((__m128i)v, 0x4e));
    const __m128i all = _mm_max_epi32(pairs, _mm_shuffle_epi32(pairs, 0xb1));
    return static_cast<uint32_t>(_mm_cvtsi128_si32(all));
#endif
  } else {
    isa::Vector<int32_t, lanes / 2> halves[2];
    __builtin_memcpy(halves, &v, sizeof(v));
    return largest(halves[0] > halves[1] ? halves[0] : halves[1]);
  }
}

// One moment of kBlock elements: exp_avg, or with `is_root` exp_avg_sq, which is coded as its
// square root. `values` has the decoded numbers, and then the new ones (of exp_avg_sq: the roots)
// until all are known, and with them the scales.
template <StateFormat format, bool is_root>
struct Coded {
  static constexpr int lanes = isa::kLanes<float>;
  using Integers = isa::Vector<int32_t, lanes>;
  using Numbers = Several<Floats>;
  using Words = Several<isa::Bits>;
  using Code = Coding<format>;
  static constexpr int kGroup = lanes * Numbers::kCount;
  static constexpr int64_t kOfScale = Code::kCodes.block;  // elements that share a scale
  static constexpr int kScales = kBlock / kOfScale;
  static_assert(kOfScale % kGroup == 0);

  float* scales;            // of the tensor
  Floats scale[kScales];    // of the codes
  Floats inverse[kScales];  // of the new scales
  bool finite[kScales];     // whether the new scales are
  alignas(64) float values[kBlock];

  MEMSAVE_EXT_INLINED explicit Coded(float* scales) : scales(scales) {}

  MEMSAVE_EXT_INLINED void open(int64_t from, int64_t to) {
    for (int k = 0; k < kScales && from + k * kOfScale < to; ++k) {
      scale[k] = Floats{} + scales[from / kOfScale + k];
    }
  }

  // A group's codes, which begin at `offset`.
  MEMSAVE_EXT_INLINED void decode(int64_t offset, const Words& codes) {
    const Floats of_group = scale[offset / kOfScale];
    Numbers numbers;
    if constexpr (!is_root) {
      numbers = Code::template decode_exp_avg<SeveralMath>(codes, of_group);
    } else {
      numbers = Code::template decode_exp_avg_sq<SeveralMath>(codes, of_group);
    }
    for (int k = 0; k < numbers.kCount; ++k) keep(offset + k * lanes, numbers.of[k]);
  }

  MEMSAVE_EXT_INLINED Words encode(int64_t offset, const Words& random) const {
    const int64_t block = offset / kOfScale;
    Numbers numbers;
    for (int k = 0; k < numbers.kCount; ++k) numbers.of[k] = kept(offset + k * lanes);
    if constexpr (!is_root) {
      return Code::template encode_exp_avg<SeveralMath>(numbers, inverse[block], random);
    } else {
      return Code::template encode_root<SeveralMath>(numbers, inverse[block], random);
    }
  }

  // Clears the bits of this moment's codes where the new scale is not finite. Called after
  // encode().
  MEMSAVE_EXT_INLINED void clear(uint8_t* codes, int64_t count, uint8_t bits) const {
    for (int k = 0; k < kScales && k * kOfScale < count; ++k) {
      if (finite[k]) continue;
      for (int64_t i = k * kOfScale; i < (k + 1) * kOfScale && i < count; ++i) codes[i] &= ~bits;
    }
  }

  MEMSAVE_EXT_INLINED Floats kept(int64_t offset) const { return isa::load(values + offset); }

  MEMSAVE_EXT_INLINED void keep(int64_t offset, Floats v) {
    __builtin_memcpy(values + offset, &v, sizeof(v));
  }

  // Sets the new scales. Called after the last value is kept.
  MEMSAVE_EXT_INLINED void find_scales(int64_t from, int64_t to) {
    for (int k = 0; k < kScales && from + k * kOfScale < to; ++k) {
      const int64_t begin = k * kOfScale, left = to - from - begin;
      uint32_t bits = largest_magnitude(begin, left < kOfScale ? left : kOfScale);
      finite[k] = bits < 0x7f800000u;
      if (!finite[k]) bits = 0x7fc00000u;  // NaN: all of the block will be NaN
      float& new_scale = scales[from / kOfScale + k];
      __builtin_memcpy(&new_scale, &bits, sizeof(bits));
      inverse[k] = inverse_scale<Math>(Floats{} + new_scale);
    }
  }

 private:
  // Returns the bits of the largest magnitude. Bits are in the order of the numbers, and those of
  // infinity and NaN are larger.
  MEMSAVE_EXT_INLINED uint32_t largest_magnitude(int64_t begin, int64_t count) const {
    Integers maximum{};
    for (int64_t i = 0; i < count; i += lanes) {
      const Integers magnitudes = (Integers)kept(begin + i) & 0x7fffffff;
      maximum = magnitudes > maximum ? magnitudes : maximum;
    }
    return largest(maximum);
  }
};

// The codes of a moment in kBlock elements. Those of fewer are read and written in a copy.
struct CodesInBlock {
  uint8_t* all;  // of the tensor
  uint8_t* block;
  uint8_t last[kBlock];

  MEMSAVE_EXT_INLINED explicit CodesInBlock(void* codes) : all(static_cast<uint8_t*>(codes)) {}

  MEMSAVE_EXT_INLINED void open(int64_t from, int64_t to) {
    for (int64_t i = 0; i < kBlock; i += 64) prefetch(all + from + i);
    block = all + from;
    if (to - from < kBlock) {
      __builtin_memset(last, 0, sizeof(last));
      __builtin_memcpy(last, block, to - from);
      block = last;
    }
  }

  MEMSAVE_EXT_INLINED void close(int64_t from, int64_t to) {
    if (block == last) __builtin_memcpy(all + from, last, to - from);
  }

  MEMSAVE_EXT_INLINED Several<isa::Bits> load(int64_t offset) const {
    Several<isa::Bits> words;
    for (int k = 0; k < words.kCount; ++k) {
      words.of[k] = isa::load_bytes(block + offset + k * isa::kLanes<float>);
    }
    return words;
  }

  MEMSAVE_EXT_INLINED void store(int64_t offset, const Several<isa::Bits>& words) {
    for (int k = 0; k < words.kCount; ++k) {
      isa::store_bytes(block + offset + k * isa::kLanes<float>, words.of[k]);
    }
  }
};

// A chunk has kBlock elements.
template <StateFormat format, int moments>
struct InBlocks {
  using V = Floats;
  static constexpr bool kClamps = true;
  static constexpr bool kInBlocks = true;
  static constexpr bool kRandom = false;  // close() draws the bits itself

  const Item& item;
  Coded<format, false> exp_avg;
  Coded<format, true> exp_avg_sq;
  CodesInBlock codes, codes_sq;  // is_joint(): all are in the first

  MEMSAVE_EXT_INLINED explicit InBlocks(const Item& item)
      : item(item),
        exp_avg(item.exp_avg_scale),
        exp_avg_sq(item.exp_avg_sq_scale),
        codes(item.exp_avg),
        codes_sq(item.exp_avg_sq) {}

  MEMSAVE_EXT_INLINED void prefetch_at(int64_t) const {}

  MEMSAVE_EXT_INLINED void open(int64_t from, int64_t to) {
    exp_avg.open(from, to);
    codes.open(from, to);
    if constexpr (kTwo) exp_avg_sq.open(from, to);
    if constexpr (kTwo && !kJoint) codes_sq.open(from, to);
  }

  // Called in the order of offsets. A group is decoded when its first offset is loaded: between
  // updates, whose divisions take the time.
  template <typename Size>
  MEMSAVE_EXT_INLINED void load(Values<V>& x, int64_t, int64_t offset, Size) {
    if (offset % kGroup == 0) {
      const Words both = codes.load(offset);
      exp_avg.decode(offset, both);
      if constexpr (kTwo) exp_avg_sq.decode(offset, kJoint ? both >> kBits : codes_sq.load(offset));
    }
    x.exp_avg = exp_avg.kept(offset);
    if constexpr (kTwo) x.exp_avg_sq = exp_avg_sq.kept(offset);
  }

  template <typename Size>
  MEMSAVE_EXT_INLINED void store(const Values<V>& x, int64_t, int64_t offset, Size size,
                                 const Noise&) {
    exp_avg.keep(offset, isa::keep(x.exp_avg, size));
    if constexpr (kTwo) exp_avg_sq.keep(offset, isa::keep(Math::square_root(x.exp_avg_sq), size));
  }

  // Random bits are drawn between finding the scales and encoding, which waits for the scales.
  MEMSAVE_EXT_INLINED void close(int64_t from, int64_t to, const Noise&) {
    exp_avg.find_scales(from, to);
    if constexpr (kTwo) exp_avg_sq.find_scales(from, to);
    if constexpr (kRandomMoments) draw(item, Draw::kMoments, from, to, noise);
    if constexpr (kJoint) {
      for (int64_t i = 0; i < to - from; i += kGroup) {
        const Words random = random_at(i);
        codes.store(i, exp_avg.encode(i, random) | exp_avg_sq.encode(i, random) << kBits);
      }
      exp_avg.clear(codes.block, to - from, (1 << kBits) - 1);
      exp_avg_sq.clear(codes.block, to - from, 0xff & ~((1 << kBits) - 1));
    } else {
      for (int64_t i = 0; i < to - from; i += kGroup) {
        codes.store(i, exp_avg.encode(i, random_at(i)));
      }
      exp_avg.clear(codes.block, to - from, 0xff);
    }
    if constexpr (kTwo && !kJoint) {
      for (int64_t i = 0; i < to - from; i += kGroup) {
        codes_sq.store(i, exp_avg_sq.encode(i, random_at(i)));
      }
      exp_avg_sq.clear(codes_sq.block, to - from, 0xff);
      codes_sq.close(from, to);
    }
    codes.close(from, to);
  }

 private:
  using Words = Several<isa::Bits>;
  static constexpr int kGroup = Coded<format, false>::kGroup;
  static constexpr bool kTwo = moments > 1;
  static constexpr bool kJoint = is_joint(format);
  static constexpr int kBits = row(format).codes.bits;

  MEMSAVE_EXT_INLINED Words random_at(int64_t offset) const {
    Words random;
    for (int k = 0; k < random.kCount; ++k) {
      random.of[k] = random_bits(noise.of + offset + k * isa::kLanes<float>);
    }
    return random;
  }

  Noise noise;
};

template <StateFormat states, typename Storage>
using Moments = std::conditional_t<
    row(states).at_random, Short<StateBits<states>, true, Element::kNone>,
    Nearest<std::conditional_t<row(states).moments == Element::kFloat, float, Storage>>>;

// moments: how many a rule has.
template <StateFormat states, typename Storage, int moments>
using States = std::conditional_t<in_blocks(states), InBlocks<states, moments>,
                                  Separate<Moments<states, Storage>, moments>>;

}  // namespace memsave_ext::adam::cpu::MEMSAVE_EXT_ISA
