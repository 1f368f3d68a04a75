// Several vectors as one, for the instruction set whose target region this is included in. Long
// chains of operations go through all of them side by side, and share constants.
#pragma once

#include "adam/cpu/math.h"

namespace memsave_ext::adam::cpu::MEMSAVE_EXT_ISA {

template <typename V>
struct Several {
  static constexpr int kCount = 4;
  V of[kCount];
};

template <typename F, typename... V>
MEMSAVE_EXT_INLINED inline auto each(const F& f, const Several<V>&... vectors) {
  Several<decltype(f(vectors.of[0]...))> results;
  for (int i = 0; i < results.kCount; ++i) results.of[i] = f(vectors.of[i]...);
  return results;
}

#define MEMSAVE_EXT_OPERATOR(op)                                                                \
  template <typename V>                                                                         \
  MEMSAVE_EXT_INLINED inline Several<V> operator op(const Several<V>& a, const Several<V>& b) { \
    return each([&](V x, V y) MEMSAVE_EXT_INLINED { return x op y; }, a, b);                    \
  }                                                                                             \
  template <typename V, typename T>                                                             \
  MEMSAVE_EXT_INLINED inline Several<V> operator op(const Several<V>& a, const T& b) {          \
    return each([&](V x) MEMSAVE_EXT_INLINED { return x op b; }, a);                            \
  }
MEMSAVE_EXT_OPERATOR(+)
MEMSAVE_EXT_OPERATOR(*)
MEMSAVE_EXT_OPERATOR(^)
MEMSAVE_EXT_OPERATOR(&)
MEMSAVE_EXT_OPERATOR(|)
MEMSAVE_EXT_OPERATOR(<<)
MEMSAVE_EXT_OPERATOR(>>)
#undef MEMSAVE_EXT_OPERATOR

// The Math that philox.h and blockwise.h ask for.
struct SeveralMath {
  struct Products {
    Several<Wide> high, low;
  };

  static MEMSAVE_EXT_INLINED Products multiply(uint32_t a, const Several<Wide>& b) {
    Products products;
    for (int i = 0; i < b.kCount; ++i) {
      const Product product = Math::multiply(a, b.of[i]);
      products.high.of[i] = product.high;
      products.low.of[i] = product.low;
    }
    return products;
  }

  static constexpr bool kLooksUp = Math::kLooksUp;

  static MEMSAVE_EXT_INLINED Several<Floats> look_up(const float (&table)[16],
                                                     const Several<isa::Bits>& index) {
    return each([&](isa::Bits i) MEMSAVE_EXT_INLINED { return Math::look_up(table, i); }, index);
  }

#define MEMSAVE_EXT_EACH(name)                                                             \
  template <typename... V>                                                                 \
  static MEMSAVE_EXT_INLINED auto name(const Several<V>&... vectors) {                     \
    return each([&](V... v) MEMSAVE_EXT_INLINED { return Math::name(v...); }, vectors...); \
  }
  MEMSAVE_EXT_EACH(fused)
  MEMSAVE_EXT_EACH(smaller)
  MEMSAVE_EXT_EACH(larger)
  MEMSAVE_EXT_EACH(bits)
  MEMSAVE_EXT_EACH(from_bits)
  MEMSAVE_EXT_EACH(nearest)
  MEMSAVE_EXT_EACH(truncated)
  MEMSAVE_EXT_EACH(number)
#undef MEMSAVE_EXT_EACH
};

}  // namespace memsave_ext::adam::cpu::MEMSAVE_EXT_ISA
