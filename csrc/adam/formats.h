// How parameters and states are stored: a row for each format, and which of them go together. What
// the CPU and CUDA dispatch on is made from these; memsave_ext/adam/formats.py has the same rows.
#pragma once

#include <cstdint>

#include "vector/types.h"

namespace memsave_ext::adam {

using vector::DType;

constexpr int64_t kBlock = 256;

inline int64_t blocks_of(int64_t numel) { return (numel + kBlock - 1) / kBlock; }

// A bfloat16 parameter can be more than its 16 bits.
enum class ParamFormat : int {
  kPlain,       // any type, rounded to nearest
  kStochastic,  // bfloat16, rounded up or down at random, so that it moves by the step on average
  kKahan,       // bfloat16 and what rounding took from it, as another bfloat16 (param_rest)
  kSplit,       // float, its upper half as a bfloat16, its lower as an int16 (param_rest)
};

enum class StateFormat : int {
  kAsParam,   // of the parameter's type, rounded to nearest
  kFloat,     // of parameters of 16 bits
  kBFloat16,  // rounded at random, of float and 16-bit parameters
  kBlocks,    // 8 bits each and a float for every kBlock of them; likewise, without amsgrad
};

// What a tensor is made of that a parameter does not decide, as c10::ScalarType numbers it.
enum class Element { kNone = -1, kUint8 = 0, kInt16 = 2, kFloat = 6, kBFloat16 = 15 };

struct ParamRow {
  ParamFormat format;
  const char* name;  // of bf16=
  Element rest;      // of param_rest; kNone where there is none
  bool at_random;    // whether storing it takes random bits
};

constexpr ParamRow kParamRows[] = {
    {ParamFormat::kPlain, "", Element::kNone, false},
    {ParamFormat::kStochastic, "stochastic", Element::kNone, true},
    {ParamFormat::kKahan, "kahan", Element::kBFloat16, false},
    {ParamFormat::kSplit, "split", Element::kInt16, false},
};

using DTypes = uint32_t;  // a bit for each

constexpr DTypes bit(DType dtype) { return 1u << static_cast<int>(dtype); }

constexpr DTypes of_at_most(int64_t bytes) {
  DTypes dtypes = 0;
  for (int i = 0; i < vector::kDTypes; ++i) {
    const auto dtype = static_cast<DType>(i);
    if (vector::item_size(dtype) <= bytes) dtypes |= bit(dtype);
  }
  return dtypes;
}

constexpr DTypes kShort = of_at_most(2);
constexpr DTypes kNarrow = of_at_most(4);  // computed in float
constexpr DTypes kAll = of_at_most(8);

// What a group's state_dtype is that makes such states: nothing, their dtype or their name.
enum class Option { kNone, kDtype, kName };

struct StateRow {
  StateFormat format;
  const char* name;
  Option option;
  Element moments;   // kNone: of the parameter's type
  DTypes params;     // which can have it
  bool at_random;    // rounded so, where the group's state_dtype says it
  bool amsgrad;      // whether it can be combined
  bool wide_enough;  // whether folded gradients find room in it beside what they are folded into
  int64_t block;     // elements that share a scale; 0: no scales
};

constexpr StateRow kStateRows[] = {
    {StateFormat::kAsParam, "as_param", Option::kNone, Element::kNone, kAll, false, true, false, 0},
    {StateFormat::kFloat, "float32", Option::kNone, Element::kFloat, kShort, false, true, true, 0},
    {StateFormat::kBFloat16, "bfloat16", Option::kDtype, Element::kBFloat16, kNarrow, true, true,
     false, 0},
    {StateFormat::kBlocks, "8bit", Option::kName, Element::kUint8, kNarrow, false, false, false,
     kBlock},
};

constexpr int kParamFormats = sizeof(kParamRows) / sizeof(ParamRow);
constexpr int kStateFormats = sizeof(kStateRows) / sizeof(StateRow);

constexpr const ParamRow& row(ParamFormat format) { return kParamRows[static_cast<int>(format)]; }
constexpr const StateRow& row(StateFormat format) { return kStateRows[static_cast<int>(format)]; }

constexpr bool rows_are_in_order() {
  for (int i = 0; i < kParamFormats; ++i) {
    if (static_cast<int>(kParamRows[i].format) != i) return false;
  }
  for (int i = 0; i < kStateFormats; ++i) {
    if (static_cast<int>(kStateRows[i].format) != i) return false;
  }
  return true;
}
static_assert(rows_are_in_order());

// Whether gradients can be folded into such states: they have the bits of what is computed in.
constexpr bool folds(DType param, StateFormat states) {
  if ((row(states).params & bit(param)) == 0) return false;
  return row(states).wide_enough ||
         (states == StateFormat::kAsParam && (param == DType::kDouble || param == DType::kFloat));
}

// What a step is made for; every device has a kernel for all that exist.
struct Combination {
  DType param;
  ParamFormat format;
  StateFormat states;
  bool amsgrad;
  bool closes;  // folded gradients

  constexpr bool exists() const {
    return (row(states).params & bit(param)) != 0 &&
           (format == ParamFormat::kPlain || param == DType::kBFloat16) &&
           (!amsgrad || row(states).amsgrad) && (!closes || folds(param, states));
  }

  constexpr int index() const {
    const int formats = static_cast<int>(param) * kParamFormats + static_cast<int>(format);
    return ((formats * kStateFormats + static_cast<int>(states)) * 2 + amsgrad) * 2 + closes;
  }

  static constexpr Combination at(int index) {
    const int formats = index / 4 / kStateFormats;
    return {static_cast<DType>(formats / kParamFormats),
            static_cast<ParamFormat>(formats % kParamFormats),
            static_cast<StateFormat>(index / 4 % kStateFormats), index / 2 % 2 != 0,
            index % 2 != 0};
  }
};

constexpr int kCombinations = vector::kDTypes * kParamFormats * kStateFormats * 4;

// Stochastic rounding adds 16 random bits below those that are kept, and cuts. Those of element i
// of a tensor are the (i % 8)-th 16 bits, from the lowest of the first word, of
// Philox4x32-10 (Salmon et al. 2011) with the optimizer's seed as key, low word first, and this
// counter: {i / 8, position of the parameter in the optimizer, step, what}. The moments of an
// element share theirs: each is right on average, they go up or down together, and a largest
// exp_avg_sq stays the largest.
enum class Draw : uint32_t { kParam = 0, kMoments = 1 };

// Arithmetic of the formats that are for bfloat16 parameters. T is float or vectors of them, Word
// uint32_t or vectors of them. Math has bits(T) and from_bits(Word), number_bits(T), which are
// those of one NaN for all, bfloat16_bits(T), rounded to nearest even in the lower half of a word,
// and signed_upper(Word), the upper half as an integer with a sign.

// A parameter and its rest, in the lower halves of words.
template <typename Word>
struct Halves {
  Word param, rest;
};

// load: param and rest in the upper halves, with zeros below. store: with 16 random bits.
template <ParamFormat format>
struct ParamBits;

// Infinity stays: it has no bits below those that are kept.
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

// An infinity has no rest: with one it would be no number when it is read again.
template <>
struct ParamBits<ParamFormat::kKahan> {
  template <typename Math, typename Word>
  static MEMSAVE_EXT_INLINE auto load(Word param, Word rest) {
    return Math::from_bits(param) + Math::from_bits(rest);
  }

  template <typename Math, typename T, typename Word>
  static MEMSAVE_EXT_INLINE Halves<Word> store(T value, Word) {
    const Word param = Math::bfloat16_bits(value);
    const T rest = value - Math::from_bits(param << 16);
    return {param, Math::bfloat16_bits(rest - rest == T{} ? rest : T{})};
  }
};

template <>
struct ParamBits<ParamFormat::kSplit> {
  template <typename Math, typename Word>
  static MEMSAVE_EXT_INLINE auto load(Word param, Word rest) {
    return Math::from_bits(param + Math::signed_upper(rest));
  }

  template <typename Math, typename T, typename Word>
  static MEMSAVE_EXT_INLINE Halves<Word> store(T value, Word) {
    const Word bits = Math::number_bits(value);
    return {(bits + 0x8000u) >> 16, bits & 0xffffu};
  }
};

// Likewise of moments that are rounded at random, to 16 bits and without a rest.
template <StateFormat format>
struct StateBits;

template <>
struct StateBits<StateFormat::kBFloat16> : ParamBits<ParamFormat::kStochastic> {};

}  // namespace memsave_ext::adam
