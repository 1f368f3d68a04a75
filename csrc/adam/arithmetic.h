// The arithmetic of every rule.
#pragma once

#include <cmath>

#include "adam/math.h"

namespace memsave_ext::adam {

// ---- Adam ----
//
// Adam (Kingma and Ba 2015, arXiv 1412.6980), decoupled weight decay (Loshchilov and Hutter 2019,
// arXiv 1711.05101) and amsgrad (Reddi et al. 2018). The operations, their order and where they are
// fused are those of torch's fused Adam on CPUs with fused multiply-add, so results are
// bit-identical to it.

// Returns the largest possible exp_avg / (sqrt(exp_avg_sq) / bias_correction2_sqrt), by the
// Cauchy-Schwarz inequality over the gradients that both are sums of. Rounded states can exceed it.
MEMSAVE_EXT_INLINE double update_bound(const Options& o, double step, Powers powers) {
  const double ratio = o.beta1 * o.beta1 / o.beta2;
  // Once beta2^step has underflowed, 0: the limit for ratio < 1. There is no bound otherwise.
  const double power = powers.beta2 > 0 ? powers.beta1 * powers.beta1 / powers.beta2 : 0;
  // The sum of all powers of ratio until the step's: of ratio 1 the step's number. What is near is
  // not known well enough for a quotient.
  const double sum = fabs(1 - ratio) > 1e-11 ? (1 - power) / (1 - ratio) : step;
  const double bound = (1 - o.beta1) * sqrt((1 - powers.beta2) / (1 - o.beta2) * sum);
  return bound > 0 && (powers.beta2 > 0 || ratio < 1) ? bound * 1.0001 : 1e30;
}

MEMSAVE_EXT_INLINE Coefficients<double> adam_coefficients(const Options& o, double lr, double step,
                                                          Powers powers, double factor) {
  Coefficients<double> c = {};
  c.grad_factor = o.maximize ? -factor : factor;
  c.decays_grad = o.weight_decay != 0 && !o.decoupled_weight_decay;
  c.grad_decay = o.weight_decay;
  c.param_decay = o.decoupled_weight_decay ? 1 - lr * o.weight_decay : 1;
  c.adds_to_exp_avg = fabs(1 - o.beta1) < 0.5;
  c.exp_avg_weight = 1 - o.beta1;
  c.beta2 = o.beta2;
  c.one_minus_beta2 = 1 - o.beta2;
  c.bias_correction2_sqrt = sqrt(1 - powers.beta2);
  c.per_bias_correction2_sqrt = 1 / c.bias_correction2_sqrt;
  c.eps = o.eps;
  c.minus_step_size = -(lr / (1 - powers.beta1));
  c.update_bound = update_bound(o, step, powers);
  return c;
}

// exp_avg = beta1 * exp_avg + (1 - beta1) * grad.
template <typename Math, typename T>
MEMSAVE_EXT_INLINE void average_grad(const Coefficients<T>& c, T grad, T& exp_avg) {
  const T base = c.adds_to_exp_avg ? exp_avg : grad;
  exp_avg = Math::fused(c.exp_avg_weight, grad - exp_avg, base);
}

template <typename Math, typename T>
MEMSAVE_EXT_INLINE void adam_moments(const Coefficients<T>& c, T grad, Values<T>& x) {
  grad = Math::product(grad, c.grad_factor);
  if (c.decays_grad) grad = Math::fused(x.param, c.grad_decay, grad);
  average_grad<Math>(c, grad, x.exp_avg);
  x.exp_avg_sq = Math::fused(c.one_minus_beta2 * grad, grad, x.exp_avg_sq * c.beta2);
}

// root: of exp_avg_sq, or with amsgrad of the largest.
template <typename Math, bool clamps, typename T>
MEMSAVE_EXT_INLINE T adam_param(const Coefficients<T>& c, T param, T exp_avg, T root) {
  T denominator;
  if constexpr (clamps) {  // with a division less: it need not have the bits of torch's
    denominator = Math::fused(root, c.per_bias_correction2_sqrt, c.eps);
    exp_avg = Math::clamped(exp_avg, c.update_bound * denominator);
  } else {
    denominator = Math::quotient(root, c.bias_correction2_sqrt) + c.eps;
  }
  return Math::product(param, c.param_decay) +
         Math::quotient(c.minus_step_size * exp_avg, denominator);
}

template <typename Math, bool amsgrad, bool clamps, typename T>
MEMSAVE_EXT_INLINE void adam_update(const Coefficients<T>& c, T grad, Values<T>& x) {
  adam_moments<Math>(c, grad, x);
  if constexpr (amsgrad) x.max_exp_avg_sq = Math::maximum(x.max_exp_avg_sq, x.exp_avg_sq);
  const T root = Math::square_root(amsgrad ? x.max_exp_avg_sq : x.exp_avg_sq);
  x.param = adam_param<Math, clamps>(c, x.param, x.exp_avg, root);
}

// ---- SGD ----
//
// Stochastic gradient descent as torch.optim.SGD has it, with momentum, dampening and Nesterov's
// momentum (Sutskever et al. 2013). The operations, their order and where they are fused are those
// of its for-loop and its foreach on CPUs with fused multiply-add, so results are bit-identical.

// The momentum buffer begins as zeros, and torch's as the first gradient, which dampening does not
// apply to: hence the weight of the first step.
MEMSAVE_EXT_INLINE Coefficients<double> sgd_coefficients(const Options& o, double lr, double step,
                                                         double factor) {
  Coefficients<double> c{};
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

// ---- Lion ----
//
// Lion (Chen et al. 2023, arXiv 2302.06675) with decoupled weight decay.

MEMSAVE_EXT_INLINE Coefficients<double> lion_coefficients(const Options& o, double lr,
                                                          double factor) {
  Coefficients<double> c{};
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

// ---- any rule ----

// step: 0 where steps are not counted. powers: only Adam's are read.
template <Rule rule>
MEMSAVE_EXT_INLINE Coefficients<double> coefficients(const Options& o, double lr, double step,
                                                     Powers powers, double factor) {
  if constexpr (is_sgd(rule)) return sgd_coefficients(o, lr, step, factor);
  if constexpr (rule == Rule::kLion) return lion_coefficients(o, lr, factor);
  if constexpr (is_adam(rule)) return adam_coefficients(o, lr, step, powers, factor);
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
