// Blockwise states of a part of a tensor, for the instruction set whose target region this is
// included in. States of other formats: formats.h.
#pragma once

#include "adam/blockwise.h"
#include "adam/cpu/formats.h"

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

// The codes of a moment in kBlock elements. Those of fewer are read and written in a copy.
struct CodesInBlock {
  static constexpr int kVectors = 4;  // that are stored at once
  static constexpr int kGroup = kVectors * isa::kLanes<float>;

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

  MEMSAVE_EXT_INLINED isa::Bits load(int64_t offset) const {
    return isa::load_bytes(block + offset);
  }

  MEMSAVE_EXT_INLINED void store(int64_t offset, const isa::Bits (&of_group)[kVectors]) {
    isa::store_bytes(block + offset, of_group);
  }
};

// One moment of kBlock elements: exp_avg, or with `is_root` exp_avg_sq, which is coded as its
// square root. `values` has the new numbers (of exp_avg_sq: the roots) until all are known, and
// with them the scales.
template <StateFormat format, bool is_root>
struct Coded {
  static constexpr int lanes = isa::kLanes<float>;
  using Integers = isa::Vector<int32_t, lanes>;
  using Code = Coding<format>;
  static constexpr int64_t kOfScale = Code::kCodes.block;  // elements that share a scale
  static constexpr int kScales = kBlock / kOfScale;
  static_assert(kOfScale % CodesInBlock::kGroup == 0);

  float* scales;            // of the tensor
  Floats scale[kScales];    // of the codes
  Floats inverse[kScales];  // of the new scales
  alignas(64) float values[kBlock];

  MEMSAVE_EXT_INLINED explicit Coded(float* scales) : scales(scales) {}

  MEMSAVE_EXT_INLINED void open(int64_t from, int64_t to) {
    for (int k = 0; k < kScales && from + k * kOfScale < to; ++k) {
      scale[k] = Floats{} + scales[from / kOfScale + k];
    }
  }

  MEMSAVE_EXT_INLINED Floats decode(int64_t offset, isa::Bits codes) const {
    const Floats of_codes = scale[offset / kOfScale];
    if constexpr (is_root) {
      return Code::template decode_exp_avg_sq<Math>(codes, of_codes);
    } else {
      return Code::template decode_exp_avg<Math>(codes, of_codes);
    }
  }

  MEMSAVE_EXT_INLINED isa::Bits encode(int64_t offset, isa::Bits random) const {
    const Floats number = kept(offset), of_codes = inverse[offset / kOfScale];
    if constexpr (is_root) {
      return Code::template encode_root<Math>(number, of_codes, random);
    } else {
      return Code::template encode_exp_avg<Math>(number, of_codes, random);
    }
  }

  MEMSAVE_EXT_INLINED Floats kept(int64_t offset) const { return isa::load(values + offset); }

  MEMSAVE_EXT_INLINED void keep(int64_t offset, Floats v) {
    __builtin_memcpy(values + offset, &v, sizeof(v));
  }

  // Sets the new scales. Returns whether no element is lost: if one is, they have to be set again
  // without it. Called after the last value is kept.
  MEMSAVE_EXT_INLINED bool find_scales(int64_t from, int64_t to) {
    bool all = true;
    for (int k = 0; k < kScales && from + k * kOfScale < to; ++k) {
      const int64_t begin = k * kOfScale, left = to - from - begin;
      const uint32_t bits = largest_magnitude(begin, left < kOfScale ? left : kOfScale);
      all = all && bits < kLost;
      float& new_scale = scales[from / kOfScale + k];
      __builtin_memcpy(&new_scale, &bits, sizeof(bits));
      inverse[k] = inverse_scale<Math>(Floats{} + new_scale);
    }
    return all;
  }

  // Returns the bits of magnitudes, which are in the order of the numbers; those of infinity and
  // NaN are larger.
  MEMSAVE_EXT_INLINED Integers magnitudes(int64_t offset) const {
    return (Integers)kept(offset) & 0x7fffffff;
  }

 private:
  MEMSAVE_EXT_INLINED uint32_t largest_magnitude(int64_t begin, int64_t count) const {
    Integers maximum{};
    for (int64_t i = 0; i < count; i += lanes) {
      const Integers of_vector = magnitudes(begin + i);
      maximum = of_vector > maximum ? of_vector : maximum;
    }
    return largest(maximum);
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

  template <typename Size>
  MEMSAVE_EXT_INLINED void load(Values<V>& x, int64_t, int64_t offset, Size) const {
    const isa::Bits both = codes.load(offset);
    x.exp_avg = exp_avg.decode(offset, both);
    if constexpr (kTwo) {
      x.exp_avg_sq = exp_avg_sq.decode(offset, kJoint ? both >> kBits : codes_sq.load(offset));
    }
  }

  template <typename Size>
  MEMSAVE_EXT_INLINED void store(const Values<V>& x, int64_t, int64_t offset, Size size,
                                 const Noise&) {
    exp_avg.keep(offset, isa::keep(x.exp_avg, size));
    if constexpr (kTwo) exp_avg_sq.keep(offset, isa::keep(Math::square_root(x.exp_avg_sq), size));
  }

  // What was stored.
  MEMSAVE_EXT_INLINED Floats new_exp_avg(int64_t offset) const { return exp_avg.kept(offset); }
  MEMSAVE_EXT_INLINED Floats root(int64_t offset) const { return exp_avg_sq.kept(offset); }

  // Random bits are drawn between finding the scales and encoding, which waits for the scales.
  // Calls beside(begin, end) for all offsets of the chunk, which may use what was stored.
  template <typename F>
  MEMSAVE_EXT_INLINED void close(int64_t from, int64_t to, const Noise&, const F& beside) {
    const int64_t count = to - from;
    const bool all = find_scales(from, to);
    if constexpr (kRandomMoments) draw(item, Draw::kMoments, from, to, noise);
    if (!all) {
      beside(0, count);
      drop_lost(count);
      find_scales(from, to);
    }
    for (int64_t i = 0; i < count; i += CodesInBlock::kGroup) {
      if (all) beside(i, count - i < CodesInBlock::kGroup ? count : i + CodesInBlock::kGroup);
      encode(i);
    }
    codes.close(from, to);
    if constexpr (kTwo && !kJoint) codes_sq.close(from, to);
  }

 private:
  static constexpr bool kTwo = moments > 1;
  static constexpr bool kJoint = is_joint(format);
  static constexpr int kBits = row(format).codes.bits;

  MEMSAVE_EXT_INLINED bool find_scales(int64_t from, int64_t to) {
    bool all = exp_avg.find_scales(from, to);
    if constexpr (kTwo) all &= exp_avg_sq.find_scales(from, to);
    return all;
  }

  // Sets both moments of elements that are lost to 0.
  void drop_lost(int64_t count) {
    constexpr int lanes = isa::kLanes<float>;
    for (int64_t i = 0; i < count; i += lanes) {
      auto kept = exp_avg.magnitudes(i) < static_cast<int32_t>(kLost);
      if constexpr (kTwo) kept &= exp_avg_sq.magnitudes(i) < static_cast<int32_t>(kLost);
      const auto only_kept = [&](Floats v) { return (Floats)((isa::Bits)kept & (isa::Bits)v); };
      exp_avg.keep(i, only_kept(exp_avg.kept(i)));
      if constexpr (kTwo) exp_avg_sq.keep(i, only_kept(exp_avg_sq.kept(i)));
    }
  }

  // The group of codes from `offset` on.
  MEMSAVE_EXT_INLINED void encode(int64_t offset) {
    isa::Bits group[CodesInBlock::kVectors], group_sq[CodesInBlock::kVectors];
    for (int k = 0; k < CodesInBlock::kVectors; ++k) {
      const int64_t i = offset + k * isa::kLanes<float>;
      const isa::Bits random = random_bits(noise.bits + i);
      group[k] = exp_avg.encode(i, random);
      if constexpr (kTwo) group_sq[k] = exp_avg_sq.encode(i, random);
      if constexpr (kJoint) group[k] |= group_sq[k] << kBits;
    }
    codes.store(offset, group);
    if constexpr (kTwo && !kJoint) codes_sq.store(offset, group_sq);
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
