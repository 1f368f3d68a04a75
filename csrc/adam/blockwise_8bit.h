// Numbers from 0 to 1 in 7 or 8 bits: the dynamic quantisation of Dettmers et al. 2022 (arXiv
// 2110.02861), with cells that meet exactly, so that code and number follow from each other without
// a table. Blockwise 8-bit states are such codes, times a scale for each block.
//
// Codes are the integers from 0. Level i has the codes from 2^i to 2^(i+1) - 1, whose numbers rise
// in equal steps from a tenth of the level's top to the top; the tops are powers of ten, the last
// is 1. Code 0 is 0. So the number is a convex, piecewise linear function of the code: it is the
// largest of the levels' lines, and the code is the smallest of their inverses.
//
// T is float or vectors of them, Word uint32_t or vectors of them. Math has, besides fused:
// smaller and larger (of numbers that are no NaN), bits(T) and from_bits(Word), nearest(T) and
// truncated(T) to a Word, and number(Word), of small integers.
#pragma once

#include "vector/types.h"

namespace memsave_ext::adam {

// Whether codes are rounded at random (true) or to nearest.
constexpr bool kRandomMoments = true;

// The line of one level: number = start + step * code, and code = offset + inverse * number.
struct CodeLevel {
  float start, step, offset, inverse;
};

constexpr CodeLevel code_level(int levels, int level) {
  double top = 1;
  for (int i = levels - 1; i > level; --i) top /= 10;
  const double codes = 1 << level;
  const double step = level == 0 ? top : 0.9 * top / codes;
  const double start = level == 0 ? 0 : top - step * (2 * codes - 1);
  return {static_cast<float>(start), static_cast<float>(step), static_cast<float>(-start / step),
          static_cast<float>(1 / step)};
}

template <typename Math, int levels, int level = levels - 1, typename T>
MEMSAVE_EXT_INLINE T number_of_code(T code) {
  constexpr CodeLevel line = code_level(levels, level);
  if constexpr (level == 0) {
    return code * line.step;
  } else {
    const T below = number_of_code<Math, levels, level - 1>(code);
    return Math::larger(below, Math::fused(T{} + line.step, code, T{} + line.start));
  }
}

// Returns the code as a real number that is not rounded yet. Ignores levels below `lowest`.
template <typename Math, int levels, int lowest = 0, int level = levels - 1, typename T>
MEMSAVE_EXT_INLINE T code_of_number(T number) {
  constexpr CodeLevel line = code_level(levels, level);
  if constexpr (level == lowest) {
    return Math::fused(T{} + line.inverse, number, T{} + line.offset);
  } else {
    const T below = code_of_number<Math, levels, lowest, level - 1>(number);
    return Math::smaller(below, Math::fused(T{} + line.inverse, number, T{} + line.offset));
  }
}

// Returns 1 / scale, by which numbers are multiplied before they are coded. Where that is infinite,
// returns the largest float, so that zeros in a block of zeros stay zeros.
template <typename Math, typename T>
MEMSAVE_EXT_INLINE T inverse_scale(T scale) {
  return Math::smaller((T{} + 1.0f) / scale, T{} + 3.40282347e+38f);
}

// Rounds to an integer. At random: adds `random` / 2^16, where `random` is 16 bits, and truncates.
template <typename Math, bool at_random, int levels, typename T, typename Word>
MEMSAVE_EXT_INLINE auto round_code(T code, Word random) {
  if constexpr (at_random) {
    const T sum = Math::fused(Math::number(random), T{} + 1.0f / 65536, code);
    return Math::truncated(Math::smaller(sum, T{} + ((1 << levels) - 1.0f)));
  } else {
    return Math::nearest(code);
  }
}

// exp_avg is coded in 7 bits and a sign, which is the highest bit. A scale that is NaN makes the
// whole block NaN.
template <typename Math, typename Word, typename Scale>
MEMSAVE_EXT_INLINE auto decode_exp_avg(Word code, Scale scale) {
  const auto number = number_of_code<Math, 7>(Math::number(code & 0x7fu)) * scale;
  return Math::from_bits(Math::bits(number) | (code & 0x80u) << 24);
}

template <typename Math, typename T, typename Scale, typename Word>
MEMSAVE_EXT_INLINE Word encode_exp_avg(T exp_avg, Scale inverse_scale, Word random) {
  const Word bits = Math::bits(exp_avg);
  const T code = code_of_number<Math, 7>(Math::from_bits(bits & 0x7fffffffu) * inverse_scale);
  return round_code<Math, kRandomMoments, 7>(code, random) | ((bits >> 24) & 0x80u);
}

// What is coded of exp_avg_sq is its square root, in 8 bits.
template <typename Math, typename Word, typename Scale>
MEMSAVE_EXT_INLINE auto decode_exp_avg_sq(Word code, Scale scale) {
  const auto root = number_of_code<Math, 8>(Math::number(code)) * scale;
  return root * root;
}

// Only a root of 0 gets code 0, since the parameter's step is divided by the root: codes below 1,
// which are those of level 0, become 1.
template <typename Math, typename T, typename Scale, typename Word>
MEMSAVE_EXT_INLINE Word encode_root(T root, Scale inverse_scale, Word random) {
  const T code = Math::larger(code_of_number<Math, 8, 1>(root * inverse_scale), T{} + 1.0f);
  const T more_unless_zero = root * 1e30f;  // a root of a float is 0 or above 1e-23
  return round_code<Math, kRandomMoments, 8>(Math::smaller(code, more_unless_zero), random);
}

}  // namespace memsave_ext::adam
