// The arithmetic of every rule, by its row.
#pragma once

#include "adam/adam_rule.h"

namespace memsave_ext::adam {

template <Rule rule>
MEMSAVE_EXT_INLINE Coefficients<double> coefficients(const Options& o, double lr, Powers powers,
                                                     StepPhase phase, double factor) {
  return adam_coefficients(o, lr, powers, phase, factor);
}

// Makes a step. `clamps` bounds it, for states that are rounded so coarsely that it could otherwise
// be of any size.
template <typename Math, Rule rule, bool clamps = false, typename T>
MEMSAVE_EXT_INLINE void update(const Coefficients<T>& c, T grad, Values<T>& x) {
  adam_update<Math, rule == Rule::kAmsgrad, clamps>(c, grad, x);
}

}  // namespace memsave_ext::adam
