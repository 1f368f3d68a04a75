// What the arithmetic of all rules shares, on CPU and CUDA: options, coefficients, values.
#pragma once

#include <cmath>

#include "adam/rules.h"
#include "vector/types.h"

namespace memsave_ext::adam {

// The options of a parameter group.
struct Options {
  double lr;
  double beta1;  // SGD: momentum
  double beta2;  // SGD: dampening
  double eps;
  double weight_decay;
  bool decoupled_weight_decay;
  bool nesterov;
  bool maximize;
  Rule rule;
  uint64_t seed;  // of random rounding
};

// beta1^step and beta2^step, for bias correction.
struct Powers {
  double beta1;
  double beta2;
};

MEMSAVE_EXT_INLINE Powers powers(const Options& o, double step) {
  return {pow(o.beta1, step), pow(o.beta2, step)};
}

// The constants of a step that all elements of a tensor share. T: a scalar or a vector. A rule sets
// those that it reads.
template <typename T>
struct Coefficients {
  T grad_factor;
  T grad_decay;      // grad_decay * param is added to the gradient where decays_grad
  T param_decay;     // decoupled weight decay: the parameter is multiplied by it; 1 without
  T exp_avg_weight;  // of grad - exp_avg in average_grad()
  T beta2;
  T one_minus_beta2;
  T bias_correction2_sqrt;
  T per_bias_correction2_sqrt;  // 1 / bias_correction2_sqrt
  T eps;
  T minus_step_size;
  T beta1;
  T update_bound;  // bound of |exp_avg| / denominator; see update_bound()
  bool decays_grad;
  bool adds_to_exp_avg;  // else to the gradient, so that a beta1 of 0 gives just the gradient
  bool nesterov;
};

// Converts coefficients to another type. `convert(double)` returns a To.
template <typename To, typename Convert>
MEMSAVE_EXT_INLINE Coefficients<To> convert(const Coefficients<double>& c, const Convert& convert) {
  Coefficients<To> to = {convert(c.grad_factor),
                         convert(c.grad_decay),
                         convert(c.param_decay),
                         convert(c.exp_avg_weight),
                         convert(c.beta2),
                         convert(c.one_minus_beta2),
                         convert(c.bias_correction2_sqrt),
                         convert(c.per_bias_correction2_sqrt),
                         convert(c.eps),
                         convert(c.minus_step_size),
                         convert(c.beta1),
                         convert(c.update_bound),
                         c.decays_grad,
                         c.adds_to_exp_avg,
                         c.nesterov};
  if (!c.adds_to_exp_avg) to.exp_avg_weight = to.exp_avg_weight - convert(1.0);
  return to;
}

// The values that a step changes; a rule has the first ones of the moments.
template <typename T>
struct Values {
  T param;
  T exp_avg;  // SGD: the momentum buffer
  T exp_avg_sq;
  T max_exp_avg_sq;  // only with amsgrad
};

// What Math must have: product(), whose result is rounded, and fused(a, b, c) = a * b + c, whose
// product is not, whatever the compiler contracts; quotient() and square_root(), which are IEEE's
// or, where a device says so, near them; maximum(), which returns NaN where either argument is NaN;
// and clamped(value, bound), from -bound to bound, where a NaN of either leaves the value as it is.

// Returns the factor that clips a gradient of this norm, like torch.nn.utils.clip_grad_norm_.
MEMSAVE_EXT_INLINE double clip_factor(double norm, double max_norm) {
  const double factor = max_norm / (norm + 1e-6);
  return factor > 1 ? 1 : factor;  // NaN stays NaN
}

}  // namespace memsave_ext::adam
