// Stochastic gradient descent as torch.optim.SGD has it, with momentum, dampening and Nesterov's
// momentum (Sutskever et al. 2013). The operations, their order and where they are fused are those
// of its for-loop and its foreach on CPUs with fused multiply-add, so results are bit-identical.
#pragma once

#include "adam/math.h"

namespace memsave_ext::adam {

// The momentum buffer begins as zeros, and torch's as the first gradient, which dampening does not
// apply to: hence the weight of the first step.
MEMSAVE_EXT_INLINE Coefficients<double> sgd_coefficients(const Options& o, double lr, double step,
                                                         double factor) {
  Coefficients<double> c{};
  c.phase = StepPhase::kWhole;
  c.grad_factor = o.maximize ? -factor : factor;
  c.decays_grad = o.weight_decay != 0;
  c.grad_decay = o.weight_decay;
  c.beta1 = o.beta1;
  c.exp_avg_weight = step == 1 ? 1 : 1 - o.beta2;
  c.adds_to_exp_avg = true;
  c.nesterov = o.nesterov;
  c.minus_step_size = -lr;
  return c;
}

template <typename Math, bool has_momentum, typename T>
MEMSAVE_EXT_INLINE void sgd_update(const Coefficients<T>& c, T grad, Values<T>& x) {
  grad = Math::product(grad, c.grad_factor);
  if (c.decays_grad) grad = Math::fused(x.param, c.grad_decay, grad);
  if constexpr (has_momentum) {
    x.exp_avg = Math::fused(c.exp_avg_weight, grad, Math::product(x.exp_avg, c.beta1));
    grad = c.nesterov ? Math::fused(c.beta1, x.exp_avg, grad) : x.exp_avg;
  }
  x.param = Math::fused(c.minus_step_size, grad, x.param);
}

}  // namespace memsave_ext::adam
