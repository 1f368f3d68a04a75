// Sums of squares, for the instruction set whose target region this is included in.
#pragma once

#include "adam/cpu/math.h"

namespace memsave_ext::adam::cpu::MEMSAVE_EXT_ISA {

// Returns half the lanes as doubles: the lower half for 0, the upper for 1.
MEMSAVE_EXT_INLINED inline Doubles widen(isa::Lanes<float> v, int half) {
  isa::Vector<float, isa::kLanes<double>> halves[2];
  __builtin_memcpy(halves, &v, sizeof(v));
#if MEMSAVE_EXT_VECTOR_BYTES == 64  // gcc 12 compiles a conversion to more than this
  return (Doubles)_mm512_maskz_cvtps_pd(0xff, (__m256)halves[half]);
#elif MEMSAVE_EXT_VECTOR_BYTES == 32
  return (Doubles)_mm256_cvtps_pd((__m128)halves[half]);
#else
  return __builtin_convertvector(halves[half], Doubles);
#endif
}

MEMSAVE_EXT_INLINED inline Doubles widen(Doubles v, int) { return v; }

// Returns the sum of squares. On every instruction set, squares of values i, i + kSums, ... go into
// sum i. Squares of floats are exact as doubles, so that it does not matter whether sums are fused.
template <typename Storage>
__attribute__((flatten)) double sum_squares(const void* values, int64_t count) {
  constexpr int kSums = 16;
  constexpr int lanes = isa::kLanes<Storage>;
  constexpr int wide_lanes = isa::kLanes<double>;
  const auto* const from = static_cast<const Storage*>(values);
  Doubles sums[kSums / wide_lanes] = {};
  const auto add = [&](int64_t i, auto size_at) MEMSAVE_EXT_INLINED {
    for (int k = 0; k < kSums; k += lanes) {
      const auto v = isa::load(from + i + k, size_at(k));
      for (int half = 0; half < lanes / wide_lanes; ++half) {
        Doubles& sum = sums[k / wide_lanes + half];
        const Doubles wide = widen(v, half);
        sum = Math::fused(wide, wide, sum);
      }
    }
  };
  int64_t i = 0;
  for (; i + kSums <= count; i += kSums) add(i, [](int) { return isa::Whole{}; });
  if (i < count) {
    add(i, [&](int k) {
      const int64_t rest = count - i - k;
      return isa::Part{rest < 0 ? 0 : rest < lanes ? rest : lanes};
    });
  }
  double parts[kSums], total = 0;
  __builtin_memcpy(parts, sums, sizeof(parts));
  for (int k = 0; k < kSums; ++k) total += parts[k];
  return total;
}

struct SquaresSource {
  template <ScalarType dtype>
  static constexpr SumSquares kernel() {
    return sum_squares<vector::StorageOf<dtype>>;
  }
};

}  // namespace memsave_ext::adam::cpu::MEMSAVE_EXT_ISA
