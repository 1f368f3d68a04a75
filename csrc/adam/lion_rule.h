// Lion (Chen et al. 2023, arXiv 2302.06675) with decoupled weight decay.
#pragma once

#include "adam/math.h"

namespace memsave_ext::adam {

MEMSAVE_EXT_INLINE Coefficients<double> lion_coefficients(const Options& o, double lr,
                                                          double factor) {
  Coefficients<double> c{};
  c.phase = StepPhase::kWhole;
  c.grad_factor = o.maximize ? -factor : factor;
  c.param_decay = 1 - lr * o.weight_decay;
  c.beta1 = o.beta1;
  c.exp_avg_weight = 1 - o.beta1;
  c.adds_to_exp_avg = true;
  c.beta2 = o.beta2;
  c.one_minus_beta2 = 1 - o.beta2;
  c.minus_step_size = -lr;
  return c;
}

// The parameter moves by the learning rate, in the direction of a sum's sign; not where it is 0.
template <typename Math, typename T>
MEMSAVE_EXT_INLINE void lion_update(const Coefficients<T>& c, T grad, Values<T>& x) {
  grad = Math::product(grad, c.grad_factor);
  const T sum = Math::fused(c.exp_avg_weight, grad, Math::product(x.exp_avg, c.beta1));
  x.exp_avg = Math::fused(c.one_minus_beta2, grad, Math::product(x.exp_avg, c.beta2));
  T change = sum > T{} ? c.minus_step_size : sum;  // sum: 0 and NaN
  change = sum < T{} ? -c.minus_step_size : change;
  x.param = Math::product(x.param, c.param_decay) + change;
}

}  // namespace memsave_ext::adam
