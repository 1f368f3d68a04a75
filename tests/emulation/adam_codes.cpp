// CUDA's arithmetic of 8- and 4-bit codes, by exponents, beside the lines that define them.
#include <cmath>

#include "adam/blockwise.h"
#include "adam/cuda/arithmetic.cuh"
#include "driver.h"

namespace emulation {
namespace {

using memsave_ext::adam::Coding;
using memsave_ext::adam::Math;
using memsave_ext::adam::StateFormat;

struct Lines : Math {
  static constexpr bool kMultipliesBits = false;
};

void expect(const char* what, double of, double found, double right) {
  ++checks;
  if (found != right) fail("adam, codes: %s of %a is %.9g, not %.9g", what, of, found, right);
}

template <typename Code>
void compare_numbers() {
  for (int i = 0; i < 1 << Code::levels; ++i) {
    const auto code = static_cast<float>(i);
    expect("the number", i, memsave_ext::adam::number_of_code<Math, Code>(code),
           memsave_ext::adam::number_of_code<Lines, Code>(code));
  }
}

// lowest: of the levels that are told apart; what is below 1 is 1 where that is not 0.
template <typename Code, int lowest>
void compare_code(float number) {
  float found = memsave_ext::adam::code_of_number<Math, Code, lowest>(number);
  float right = memsave_ext::adam::code_of_number<Lines, Code, lowest>(number);
  if (lowest > 0) {
    found = std::fmax(found, 1.0f);
    right = std::fmax(right, 1.0f);
  }
  expect("the code", number, found, right);
}

template <typename Code, int lowest>
void compare_codes() {
  compare_code<Code, lowest>(0);
  // Around each power of 2, where levels and roundings change, and everywhere between.
  for (int exponent = -149; exponent < 0; ++exponent) {
    const float power = std::ldexp(1.0f, exponent);
    for (int i = 0; i < 1000; ++i) {
      compare_code<Code, lowest>(power * (1 + static_cast<float>(i) / 1009));
    }
    float above = power, below = power;
    for (int i = 0; i < 20; ++i) {
      compare_code<Code, lowest>(above = std::nextafter(above, 2.0f));
      compare_code<Code, lowest>(below = std::nextafter(below, 0.0f));
    }
  }
  float below = 1;
  for (int i = 0; i < 1000; ++i, below = std::nextafter(below, 0.0f)) {
    compare_code<Code, lowest>(below);
  }
}

template <StateFormat format>
void compare() {
  using Code = Coding<format>;
  compare_numbers<typename Code::Magnitude>();
  compare_numbers<typename Code::Root>();
  compare_codes<typename Code::Magnitude, 0>();
  compare_codes<typename Code::Root, 1>();
}

}  // namespace

void run_codes() {
  compare<StateFormat::k8Bit>();
  compare<StateFormat::k4Bit>();
}

}  // namespace emulation
