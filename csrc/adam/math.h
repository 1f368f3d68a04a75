// The arithmetic of a step, the same for CPU and CUDA. Kingma and Ba 2015 (arXiv 1412.6980), decay
// decoupled as in Loshchilov and Hutter 2019 (arXiv 1711.05101), amsgrad as in Reddi et al. 2018;
// operations, their order and where they are fused are those of torch's fused Adam on CPUs with
// fused multiply-add, whose bits these are.
#pragma once

#include <cmath>

#include "vector/types.h"

namespace memsave_ext::adam {

// The options of a parameter group.
struct Options {
  double lr;
  double beta1;
  double beta2;
  double eps;
  double weight_decay;
  bool decoupled_weight_decay;
  bool amsgrad;
  bool maximize;
};

// What is left of the moments' zeros, from which they start.
struct Powers {
  double beta1;
  double beta2;
};

MEMSAVE_EXT_INLINE Powers powers(const Options& o, double step) {
  return {pow(o.beta1, step), pow(o.beta2, step)};
}

// What a step needs of options and step, for all elements of a tensor. T: a scalar or a vector.
template <typename T>
struct Coefficients {
  T sign;            // of the gradient
  T grad_decay;      // added to the gradient, times the parameter
  T param_decay;     // what a decoupled decay leaves of the parameter
  T exp_avg_weight;  // of the difference between gradient and exp_avg, added to either
  T beta2;
  T one_minus_beta2;
  T bias_correction2_sqrt;
  T eps;
  T minus_step_size;
  bool decays_grad;
  bool adds_to_exp_avg;  // else to the gradient, which a beta1 of 0 then returns
};

MEMSAVE_EXT_INLINE Coefficients<double> coefficients(const Options& o, double lr, Powers powers) {
  Coefficients<double> c;
  c.sign = o.maximize ? -1 : 1;
  c.decays_grad = o.weight_decay != 0 && !o.decoupled_weight_decay;
  c.grad_decay = o.weight_decay;
  c.param_decay = o.decoupled_weight_decay ? 1 - lr * o.weight_decay : 1;
  c.adds_to_exp_avg = fabs(1 - o.beta1) < 0.5;
  c.exp_avg_weight = 1 - o.beta1;
  c.beta2 = o.beta2;
  c.one_minus_beta2 = 1 - o.beta2;
  c.bias_correction2_sqrt = sqrt(1 - powers.beta2);
  c.eps = o.eps;
  c.minus_step_size = -(lr / (1 - powers.beta1));
  return c;
}

// convert(double) returns a To.
template <typename To, typename Convert>
MEMSAVE_EXT_INLINE Coefficients<To> convert(const Coefficients<double>& c, const Convert& convert) {
  Coefficients<To> to = {convert(c.sign),
                         convert(c.grad_decay),
                         convert(c.param_decay),
                         convert(c.exp_avg_weight),
                         convert(c.beta2),
                         convert(c.one_minus_beta2),
                         convert(c.bias_correction2_sqrt),
                         convert(c.eps),
                         convert(c.minus_step_size),
                         c.decays_grad,
                         c.adds_to_exp_avg};
  if (!c.adds_to_exp_avg) to.exp_avg_weight = to.exp_avg_weight - convert(1.0);
  return to;
}

// What a step changes.
template <typename T>
struct Values {
  T param;
  T exp_avg;
  T exp_avg_sq;
  T max_exp_avg_sq;  // with amsgrad
};

// Math: product is rounded and fused(a, b, c) = a * b + c is not, whatever a compiler contracts;
// maximum returns a NaN where it is given one.
template <typename Math, bool amsgrad, typename T>
MEMSAVE_EXT_INLINE void update(const Coefficients<T>& c, T grad, Values<T>& x) {
  grad = grad * c.sign;
  if (c.decays_grad) grad = Math::fused(x.param, c.grad_decay, grad);
  const T base = c.adds_to_exp_avg ? x.exp_avg : grad;
  x.exp_avg = Math::fused(c.exp_avg_weight, grad - x.exp_avg, base);
  x.exp_avg_sq = Math::fused(c.one_minus_beta2 * grad, grad, x.exp_avg_sq * c.beta2);
  if constexpr (amsgrad) x.max_exp_avg_sq = Math::maximum(x.max_exp_avg_sq, x.exp_avg_sq);
  const T second = amsgrad ? x.max_exp_avg_sq : x.exp_avg_sq;
  const T denominator = Math::square_root(second) / c.bias_correction2_sqrt + c.eps;
  x.param = Math::product(x.param, c.param_decay) + c.minus_step_size * x.exp_avg / denominator;
}

}  // namespace memsave_ext::adam
