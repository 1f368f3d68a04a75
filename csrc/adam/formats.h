// How parameters and states are stored: a row for each format, and which formats can be combined.
// The kernel tables of CPU and CUDA are built from these rows.
#pragma once

#include <cstdint>

#include "adam/rules.h"
#include "vector/types.h"

namespace memsave_ext::adam {

using vector::DType;

// Elements that are stepped together: neither blocks of states that share a scale nor draws of
// random bits go over its multiples.
constexpr int64_t kBlock = 256;

// How a parameter is stored. All but kPlain are for bfloat16 parameters.
enum class ParamFormat : int { MEMSAVE_EXT_PARAM_FORMATS(MEMSAVE_EXT_FIRST) };

// How the moments are stored.
enum class StateFormat : int { MEMSAVE_EXT_STATE_FORMATS(MEMSAVE_EXT_FIRST) };

// Type of a tensor's elements, with c10::ScalarType's numbers; kNone where there is no such tensor,
// or where the parameter's type decides.
enum class Element { kNone = -1, kUint8 = 0, kInt8 = 1, kInt16 = 2, kFloat = 6, kBFloat16 = 15 };

struct ParamRow {
  const char* name;  // value of bf16=; empty for None
  Element low_part;  // type of the low part; kNone where there is none
  bool at_random;    // storing it takes random bits
};

constexpr ParamRow kParamRows[] = {
#define ROW(id, name, low_part, at_random) {name, Element::low_part, at_random},
    MEMSAVE_EXT_PARAM_FORMATS(ROW)
#undef ROW
};

// How numbers are coded in blocks that share a scale: see blockwise.h.
struct Codes {
  int64_t block;  // elements of a block; 0: there are no codes
  int bits;       // of a code
  int ratio;      // of the largest numbers of neighbouring levels
};

struct StateRow {
  const char* name;
  bool is_option;       // state_dtype= asks for it: by the moments' type, or the name of codes
  Element moments;      // their type; kNone: the parameter's
  int64_t param_bytes;  // the most that an element has of a parameter with such states
  bool at_random;       // rounded at random, where state_dtype= asks for it; for codes see
                        // blockwise.h
  bool amsgrad;         // can be combined with amsgrad
  Codes codes;
};

constexpr StateRow kStateRows[] = {
#define ROW(id, name, is_option, moments, param_bytes, at_random, amsgrad, block, bits, ratio) \
  {name, is_option, Element::moments, param_bytes, at_random, amsgrad, {block, bits, ratio}},
    MEMSAVE_EXT_STATE_FORMATS(ROW)
#undef ROW
};

constexpr int kParamFormats = sizeof(kParamRows) / sizeof(ParamRow);
constexpr int kStateFormats = sizeof(kStateRows) / sizeof(StateRow);

constexpr const ParamRow& row(ParamFormat format) { return kParamRows[static_cast<int>(format)]; }
constexpr const StateRow& row(StateFormat format) { return kStateRows[static_cast<int>(format)]; }

constexpr bool in_blocks(StateFormat format) { return row(format).codes.block > 0; }

// Whether an element has one code for both moments: that of exp_avg in the lower bits of a byte,
// that of exp_avg_sq in the upper.
constexpr bool is_joint(StateFormat format) {
  return in_blocks(format) && row(format).codes.bits <= 4;
}

constexpr int64_t blocks_of(StateFormat format, int64_t numel) {
  const int64_t block = row(format).codes.block;
  return (numel + block - 1) / block;
}

constexpr bool blocks_are_valid() {
  for (const StateRow& row : kStateRows) {
    if (row.codes.block > 0 && kBlock % row.codes.block != 0) return false;
  }
  return true;
}
static_assert(blocks_are_valid());

// Whether a parameter of this type can have such states.
constexpr bool takes(DType param, StateFormat states) {
  return vector::item_size(param) <= row(states).param_bytes;
}

// Whether the rule's moments can be stored in this format.
constexpr bool fits(Rule rule, StateFormat states) {
  const int moments = row(rule).moments;
  if (moments == 0) return states == StateFormat::kAsParam;  // which stands for none
  return moments == 1 ? !is_joint(states) : moments == 2 || row(states).amsgrad;
}

// What a step's kernel is compiled for. Every device has a kernel for each one that exists().
struct Combination {
  DType param;
  ParamFormat format;
  StateFormat states;
  Rule rule;

  constexpr bool exists() const {
    return takes(param, states) && (format == ParamFormat::kPlain || param == DType::kBFloat16) &&
           fits(rule, states);
  }

  constexpr int index() const {
    const int formats = static_cast<int>(param) * kParamFormats + static_cast<int>(format);
    return (formats * kStateFormats + static_cast<int>(states)) * kRules + static_cast<int>(rule);
  }

  static constexpr Combination at(int index) {
    const int states = index / kRules, formats = states / kStateFormats;
    return {static_cast<DType>(formats / kParamFormats),
            static_cast<ParamFormat>(formats % kParamFormats),
            static_cast<StateFormat>(states % kStateFormats), static_cast<Rule>(index % kRules)};
  }
};

constexpr int kCombinations = vector::kDTypes * kParamFormats * kStateFormats * kRules;

// Stochastic rounding adds 16 random bits below the bits that are kept, and truncates. The random
// bits of a tensor's element i are the (i % 8)-th 16 bits, counted from the lowest of the first
// word, of Philox4x32-10 (Salmon et al. 2011) with the optimizer's seed as key, low word first, and
// this counter: {i / 8, position of the parameter in the optimizer, step, Draw}. The moments of an
// element share their random bits: each is right on average, they are rounded up or down together,
// and max_exp_avg_sq stays the largest.
enum class Draw : uint32_t { kParam = 0, kMoments = 1 };

// Arithmetic of the formats for bfloat16 parameters. T is float or a vector of floats, Word is
// uint32_t or a vector of them. Math has bits(T) and from_bits(Word); number_bits(T), which gives
// the same bits for every NaN; and signed_upper(Word), the upper half as a signed integer.

// A parameter and its low part, each in the lowest bits of a word.
template <typename Word>
struct Halves {
  Word param, low_part;
};

// load() takes param and low_part in the uppermost bits of words, with zeros below. store() returns
// them in the lowest, and takes 16 random bits.
template <ParamFormat format>
struct ParamBits;

// Infinity stays infinity: the bits that are cut from it are zeros, so random bits never carry.
template <>
struct ParamBits<ParamFormat::kStochastic> {
  template <typename Math, typename Word>
  static MEMSAVE_EXT_INLINE auto load(Word param, Word) {
    return Math::from_bits(param);
  }

  template <typename Math, typename T, typename Word>
  static MEMSAVE_EXT_INLINE Halves<Word> store(T value, Word random) {
    return {(Math::number_bits(value) + random) >> 16, random};
  }
};

template <>
struct ParamBits<ParamFormat::kSplit> {
  template <typename Math, typename Word>
  static MEMSAVE_EXT_INLINE auto load(Word param, Word low_bits) {
    return Math::from_bits(param + Math::signed_upper(low_bits));
  }

  template <typename Math, typename T, typename Word>
  static MEMSAVE_EXT_INLINE Halves<Word> store(T value, Word) {
    const Word bits = Math::number_bits(value);
    return {(bits + 0x8000u) >> 16, bits & 0xffffu};
  }
};

// The rest is what the 24 bits differ by from the bfloat16 nearest to them, in units of 2^-8 of
// what bfloat16 resolves there. To nearest, steps of less than 2^-17 of a weight would be lost.
template <>
struct ParamBits<ParamFormat::kSplit8> : ParamBits<ParamFormat::kSplit> {
  template <typename Math, typename T, typename Word>
  static MEMSAVE_EXT_INLINE Halves<Word> store(T value, Word random) {
    const Word bits = Math::number_bits(value) + (random & 0xffu);
    return {(bits + 0x8000u) >> 16, (bits >> 8) & 0xffu};
  }
};

// The same for moments that are rounded at random, to 16 bits and without a low part.
template <StateFormat format>
struct StateBits;

template <>
struct StateBits<StateFormat::kBFloat16> : ParamBits<ParamFormat::kStochastic> {};

// Tables of kernels are filled in the same way for every device, so that all support the same
// formats.
template <typename Kernel>
struct KernelTable {
  Kernel kernels[kCombinations];

  constexpr Kernel operator[](const Combination& combination) const {
    return kernels[combination.index()];
  }
};

// Fills the table's entries of combinations that exist and for which Source::makes(combination) is
// true: with Source::kernel<index>(), the kernel for Combination::at(index).
template <typename Source, int begin = 0, int end = kCombinations, typename Kernel>
constexpr void fill(KernelTable<Kernel>& table) {
  if constexpr (end - begin > 1) {
    constexpr int middle = begin + (end - begin) / 2;
    fill<Source, begin, middle>(table);
    fill<Source, middle, end>(table);
  } else {
    constexpr Combination combination = Combination::at(begin);
    if constexpr (combination.exists() && Source::makes(combination)) {
      table.kernels[begin] = Source::template kernel<begin>();
    }
  }
}

// Fills a table that is indexed by DType alone, with Source::kernel<dtype>().
template <typename Source, int dtype = 0, typename Kernel>
constexpr void fill(Kernel (&table)[vector::kDTypes]) {
  if constexpr (dtype < vector::kDTypes) {
    table[dtype] = Source::template kernel<static_cast<DType>(dtype)>();
    fill<Source, dtype + 1>(table);
  }
}

}  // namespace memsave_ext::adam
