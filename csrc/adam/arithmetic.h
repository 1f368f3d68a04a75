// The arithmetic of every rule, by its row.
#pragma once

#include "adam/adam_rule.h"
#include "adam/lion_rule.h"
#include "adam/sgd_rule.h"

namespace memsave_ext::adam {

// step: 0 where steps are not counted. powers: only Adam's are read.
template <Rule rule>
MEMSAVE_EXT_INLINE Coefficients<double> coefficients(const Options& o, double lr, double step,
                                                     Powers powers, StepPhase phase,
                                                     double factor) {
  if constexpr (is_sgd(rule)) return sgd_coefficients(o, lr, step, factor);
  if constexpr (rule == Rule::kLion) return lion_coefficients(o, lr, factor);
  if constexpr (is_adam(rule)) return adam_coefficients(o, lr, powers, phase, factor);
}

// Makes a step. `clamps` bounds Adam's, for states that are rounded so coarsely that it could
// otherwise be of any size.
template <typename Math, Rule rule, bool clamps = false, typename T>
MEMSAVE_EXT_INLINE void update(const Coefficients<T>& c, T grad, Values<T>& x) {
  if constexpr (is_sgd(rule)) sgd_update<Math, rule == Rule::kMomentum>(c, grad, x);
  if constexpr (rule == Rule::kLion) lion_update<Math>(c, grad, x);
  if constexpr (is_adam(rule)) adam_update<Math, rule == Rule::kAmsgrad, clamps>(c, grad, x);
}

}  // namespace memsave_ext::adam
