// Numbers from 0 to 1 in a few bits: the dynamic quantisation of Dettmers et al. 2022 (arXiv
// 2110.02861), with cells that meet exactly, so that code and number follow from each other without
// a table. Blockwise states are such codes, times a scale for each block.
//
// Codes are the integers from 0. Level i has the codes from 2^i to 2^(i+1) - 1, whose numbers rise
// in equal steps to the level's top from the top of the level before; the tops are powers of the
// row's ratio, the last is 1. Code 0 is 0. So the number is a convex, piecewise linear function of
// the code: it is the largest of the levels' lines, and the code is the smallest of their inverses.
//
// T is float or vectors of them, Word uint32_t or vectors of them. Math has, besides fused:
// smaller and larger (of numbers that are no NaN), bits(T) and from_bits(Word), nearest(T) and
// truncated(T) to a Word, zero_where_zero(T, Word), and number(Word), of small integers;
// kMultipliesBits, and where that is true upper_half(Word, Word) of a product; kLooksUp,
// and where that is true look_up(table, Word), which reads a table of 16 or 8 numbers by the lowest
// bits, and thirds_of_exponent<least>(T).
#pragma once

#include "adam/formats.h"
#include "vector/types.h"

namespace memsave_ext::adam {

// Whether codes are rounded at random (true) or to nearest.
constexpr bool kRandomMoments = true;

// The bits of 2^63, without which a block is to go on: an element of which exp_avg, or the root of
// exp_avg_sq, has this magnitude or is NaN, which have at least these bits, loses both. They are
// coded as 0, and scales are those of the others. A root past it has a square that is infinite.
constexpr uint32_t kLost = 0x5f000000u;

// The line of one level: number = start + step * code, and code = offset + inverse * number.
struct CodeLevel {
  float start, step, offset, inverse;
};

constexpr CodeLevel code_level(int levels, int ratio, int level) {
  double top = 1;
  for (int i = levels - 1; i > level; --i) top /= ratio;
  const double codes = 1 << level;
  const double step = level == 0 ? top : (1 - 1.0 / ratio) * top / codes;
  const double start = level == 0 ? 0 : top - step * (2 * codes - 1);
  return {static_cast<float>(start), static_cast<float>(step), static_cast<float>(-start / step),
          static_cast<float>(1 / step)};
}

// A code of so many levels, each of which has its top at `ratio` times the top of the one before.
template <int levels_, int ratio>
struct Levels {
  static constexpr int levels = levels_;
  static constexpr CodeLevel line(int level) { return code_level(levels, ratio, level); }
  // Whether the level can be told by exponents: that of a code, and of a number a third of it. At
  // every float the level's line then gives the same bits as the largest or smallest of all.
  static constexpr bool kByExponent = ratio == 8 && levels > 4;
  static constexpr float kRatio = ratio;
  // Of level 0; a power of the ratio.
  static constexpr float lowest_top() { return code_level(levels, ratio, 0).step; }
};

// Lines in tables: values at 0, and slopes.
struct Lines {
  float at_0[8], slope[8];
};

// Numbers of codes, by the lowest 3 bits of the exponent of a code as a float.
template <typename Code>
constexpr Lines lines_of_codes() {
  Lines lines{};
  for (int level = 0; level < Code::levels; ++level) {
    const CodeLevel line = Code::line(level);
    lines.at_0[(127 + level) % 8] = line.start;
    lines.slope[(127 + level) % 8] = line.step;
  }
  return lines;
}

// Codes of numbers, by how many levels above `lowest` a number is. That of 1, as the only one of
// the last level whose exponent is that of the next, has the last level's line, too.
template <typename Code, int lowest>
constexpr Lines lines_of_numbers() {
  static_assert(Code::levels - lowest == 7);
  Lines lines{};
  for (int i = 0; i < 8; ++i) {
    const CodeLevel line = Code::line(i < 7 ? lowest + i : Code::levels - 1);
    lines.at_0[i] = line.offset;
    lines.slope[i] = line.inverse;
  }
  return lines;
}

template <typename Math, typename T, typename Word>
MEMSAVE_EXT_INLINE T on_line(const Lines& lines, Word line, T x) {
  return Math::fused(Math::look_up(lines.slope, line), x, Math::look_up(lines.at_0, line));
}

// The number of a code c by its exponent, from which 2^i is, as a float; all is exact. A level's
// line, with r for the ratio: lowest_top * (r / 2)^i * ((r - 1) * (c + 1) - (r - 2) * 2^i) / r.
template <typename Math, typename Code>
MEMSAVE_EXT_INLINE float number_by_exponent(float code) {
  constexpr float r = Code::kRatio, unit = Code::lowest_top() / r;
  static_assert(r == 8 || r == 4);
  const float power = Math::from_bits(Math::bits(code) & 0xff800000u);  // code 0: 0
  const float sum = Math::fused(code, (r - 1) * unit, (r - 1) * unit);
  const float of_power = Math::fused(power, -(r - 2) * unit, sum);
  return of_power * (r == 8 ? power * power : power);
}

template <typename Math, typename Code, int level = Code::levels - 1, typename T>
MEMSAVE_EXT_INLINE T number_of_code(T code) {
  constexpr CodeLevel line = Code::line(level);
  if constexpr (Math::kMultipliesBits && level == Code::levels - 1) {
    return number_by_exponent<Math, Code>(code);
  } else if constexpr (Math::kLooksUp && Code::kByExponent) {
    static constexpr Lines kLines = lines_of_codes<Code>();
    const T number = on_line<Math>(kLines, Math::bits(code) >> 23, code);
    return Math::larger(number, T{});  // code 0 has the bits of level 1
  } else if constexpr (level == 0) {
    return code * line.step;
  } else {
    const T below = number_of_code<Math, Code, level - 1>(code);
    return Math::larger(below, Math::fused(T{} + line.step, code, T{} + line.start));
  }
}

// The numbers of all codes of at most 4 bits, and of exp_avg's, whose highest bit is the sign. They
// are exact in float, so that it does not matter how they are computed.
struct Table {
  float numbers[16];
};

template <typename Code>
constexpr Table numbers_of_codes(bool sign) {
  static_assert(Code::levels <= 4);
  Table table{};
  const int codes = 1 << Code::levels;
  for (int i = 0; i < 16; ++i) {
    const int code = i % codes;
    int level = 0;
    while ((2 << level) <= code) ++level;
    const CodeLevel line = Code::line(level);
    const float number = line.start + line.step * static_cast<float>(code);
    table.numbers[i] = sign && i >= codes ? -number : number;
  }
  return table;
}

// The code of a number by its exponent, of the levels from 1 on: of numbers past a level's top by
// one unit of a float to the next one's, the exponent is one of three. Adding to the bits and
// dividing by 3 makes them those of a float from 2^i to 2^(i + 1), where i is the level. At every
// float the line has the bits of code_level's. `clamps`: below level 1 its line goes on; else what
// it gives there is at most 1.
template <typename Math, typename Code, bool clamps>
MEMSAVE_EXT_INLINE float code_by_exponent(float number) {
  static_assert(Code::kByExponent);
  constexpr uint32_t kOne = uint32_t{1} << 23, kThird = 0x55555555u;
  constexpr int levels = Code::levels;
  constexpr CodeLevel first = Code::line(1);
  constexpr uint32_t kLeast = (127 - 3 * (levels - 1)) * kOne + 1;
  uint32_t bits = Math::bits(number);
  if constexpr (clamps) bits = bits < kLeast ? kLeast : bits;
  const uint32_t third = Math::upper_half(bits + (254 + 3 * levels) * kOne, kThird);
  const uint32_t power = third & 0xff800000u;
  // The slope falls by 4 from level to level.
  const float slope = Math::from_bits(Math::bits(first.inverse) + 2 * 128 * kOne - 2 * power);
  const float offset = Math::fused(Math::from_bits(power), 6.0f / 7, -1.0f);
  return Math::fused(slope, number, offset);
}

// Returns the code as a real number that is not rounded yet. Ignores levels below `lowest`.
template <typename Math, typename Code, int lowest = 0, int level = Code::levels - 1, typename T>
MEMSAVE_EXT_INLINE T code_of_number(T number) {
  constexpr CodeLevel line = Code::line(level);
  if constexpr (Math::kMultipliesBits && Code::kByExponent) {
    const T code = code_by_exponent<Math, Code, lowest == 0>(number);
    return lowest == 0 ? Math::smaller(code, number * Code::line(0).inverse) : code;
  } else if constexpr (Math::kLooksUp && Code::kByExponent) {
    static constexpr Lines kLines = lines_of_numbers<Code, lowest>();
    // The exponents of 1 and of 7 levels, of 3 each, below it.
    return on_line<Math>(kLines, Math::template thirds_of_exponent<127 - 7 * 3>(number), number);
  } else if constexpr (level == lowest) {
    return Math::fused(T{} + line.inverse, number, T{} + line.offset);
  } else {
    const T below = code_of_number<Math, Code, lowest, level - 1>(number);
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
// That is never past the last code: a block's largest times the inverse of it is 1 at most.
template <typename Math, typename T, typename Word>
MEMSAVE_EXT_INLINE auto round_code(T code, Word random) {
  if constexpr (kRandomMoments) {
    const T sum = Math::fused(Math::number(random), T{} + 1.0f / 65536, code);
    return Math::truncated(sum);
  } else {
    return Math::nearest(code);
  }
}

// The codes of both moments in one format. exp_avg has a sign, which is its code's highest bit, and
// one level less.
template <StateFormat format>
struct Coding {
  static constexpr Codes kCodes = row(format).codes;
  static constexpr uint32_t kSign = 1u << (kCodes.bits - 1);
  static constexpr int kShift = 32 - kCodes.bits;  // from the sign of a code to that of a float
  using Magnitude = Levels<kCodes.bits - 1, kCodes.ratio>;
  using Root = Levels<kCodes.bits, kCodes.ratio>;
  template <typename Math>
  static constexpr bool kLooksUp = Math::kLooksUp && kCodes.bits == 4 && kCodes.ratio == 4;

  template <typename Math, typename Word, typename Scale>
  static MEMSAVE_EXT_INLINE auto decode_exp_avg(Word code, Scale scale) {
    if constexpr (kLooksUp<Math>) {
      static constexpr Table kNumbers = numbers_of_codes<Magnitude>(true);
      return Math::look_up(kNumbers.numbers, code) * scale;
    } else {
      const auto number = number_of_code<Math, Magnitude>(Math::number(code & (kSign - 1))) * scale;
      return Math::from_bits(Math::bits(number) | (code & kSign) << kShift);
    }
  }

  template <typename Math, typename T, typename Scale, typename Word>
  static MEMSAVE_EXT_INLINE Word encode_exp_avg(T exp_avg, Scale inverse_scale, Word random) {
    const Word bits = Math::bits(exp_avg);
    const T magnitude = Math::from_bits(bits & 0x7fffffffu) * inverse_scale;
    const T code = code_of_number<Math, Magnitude>(magnitude);
    return round_code<Math>(code, random) | ((bits >> kShift) & kSign);
  }

  // What is coded of exp_avg_sq is its square root.
  template <typename Math, typename Word, typename Scale>
  static MEMSAVE_EXT_INLINE auto decode_exp_avg_sq(Word code, Scale scale) {
    if constexpr (kLooksUp<Math>) {
      static constexpr Table kNumbers = numbers_of_codes<Root>(false);
      const auto root = Math::look_up(kNumbers.numbers, code) * scale;
      return root * root;
    } else {
      const auto root = number_of_code<Math, Root>(Math::number(code)) * scale;
      return root * root;
    }
  }

  // Only a root of 0 gets code 0, since the parameter's step is divided by the root: codes below 1,
  // which are those of level 0, become 1.
  template <typename Math, typename T, typename Scale, typename Word>
  static MEMSAVE_EXT_INLINE Word encode_root(T root, Scale inverse_scale, Word random) {
    const T code = Math::larger(code_of_number<Math, Root, 1>(root * inverse_scale), T{} + 1.0f);
    return Math::zero_where_zero(root, round_code<Math>(code, random));
  }
};

}  // namespace memsave_ext::adam
