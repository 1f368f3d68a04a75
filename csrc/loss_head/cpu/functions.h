// exp and tanh of vectors, for the instruction set whose target region this is included in. Those
// of floats are the Cephes library's (S. L. Moshier, public domain): errors of about one unit in
// the last place. Doubles go through the C library, one by one.
#pragma once

#include "vector/cpu.h"

namespace memsave_ext::loss_head::cpu::MEMSAVE_EXT_ISA {

namespace isa = vector::MEMSAVE_EXT_ISA;
using Floats = isa::Lanes<float>;
using Doubles = isa::Lanes<double>;
using Integers = isa::Vector<int32_t, isa::kLanes<float>>;

// exp(x) is below the smallest normal number for smaller ones, and 0 then.
constexpr float kSmallest = -87.33654f;
constexpr float kLargest = 88.37626f;  // and infinite for larger ones

MEMSAVE_EXT_INLINED inline Floats exponential(Floats x) {
  const Floats low = Floats{} + kSmallest, high = Floats{} + kLargest;
  Floats bounded = x > low ? x : low;  // NaN becomes `low`, and is chosen again at the end
  bounded = bounded < high ? bounded : high;
  // In a float of 1.5 * 2^23 the lowest bits are an integer.
  constexpr float kInteger = 12582912.0f;
  const Floats shifted = bounded * 1.44269504088896341f + kInteger;
  const Floats n = shifted - kInteger;
  // ln 2 in two parts: the product with the first is exact.
  Floats r = bounded - n * 0.693359375f;
  r = r - n * -2.12194440e-4f;
  Floats p = r * 1.9875691500e-4f + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + r + 1.0f;
  const Integers power = ((Integers)shifted << 23) + (127 << 23);
  Floats value = p * (Floats)power;
  value = x < low ? Floats{} : value;
  value = x > high ? Floats{} + __builtin_inff() : value;
  return x == x ? value : x;
}

MEMSAVE_EXT_INLINED inline Floats hyperbolic_tangent(Floats x) {
  const Floats size = x < 0.0f ? -x : x;
  const Floats z = x * x;
  Floats p = z * -5.70498872745e-3f + 2.06390887954e-2f;
  p = p * z - 5.37397155531e-2f;
  p = p * z + 1.33314422036e-1f;
  p = p * z - 3.33332819422e-1f;
  p = p * z * x + x;
  const Floats bounded = size < 20.0f ? size : Floats{} + 20.0f;
  const Floats far = 1.0f - 2.0f / (exponential(bounded + bounded) + 1.0f);
  const Floats value = size < 0.625f ? p : (x < 0.0f ? -far : far);
  return x == x ? value : x;
}

MEMSAVE_EXT_INLINED inline Doubles exponential(Doubles x) {
  for (int i = 0; i < isa::kLanes<double>; ++i) x[i] = std::exp(x[i]);
  return x;
}

MEMSAVE_EXT_INLINED inline Doubles hyperbolic_tangent(Doubles x) {
  for (int i = 0; i < isa::kLanes<double>; ++i) x[i] = std::tanh(x[i]);
  return x;
}

}  // namespace memsave_ext::loss_head::cpu::MEMSAVE_EXT_ISA
