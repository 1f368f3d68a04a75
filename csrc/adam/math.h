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
  uint64_t seed;  // of random rounding
};

// A step is made whole, or in parts: micro-gradients are folded into the moments, the last of them
// with an update of the parameter.
enum class Phase : int { kWhole, kFirstFold, kFold, kClose };

// The parameter and the count of steps stay as they are.
MEMSAVE_EXT_INLINE bool is_fold(Phase phase) {
  return phase == Phase::kFirstFold || phase == Phase::kFold;
}

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
  T grad_factor;
  T grad_decay;      // added to the gradient, times the parameter
  T param_decay;     // what a decoupled decay leaves of the parameter
  T exp_avg_weight;  // of the difference between gradient and exp_avg, added to either
  T beta2;
  T one_minus_beta2;
  T bias_correction2_sqrt;
  T eps;
  T minus_step_size;
  T beta1;
  T per_exp_avg_weight;  // 1 / (1 - beta1)
  T update_bound;        // of a step, over minus_step_size
  bool decays_grad;
  bool adds_to_exp_avg;  // else to the gradient, which a beta1 of 0 then returns
  Phase phase;
};

// What exp_avg / (sqrt(exp_avg_sq) / bias_correction2_sqrt) cannot exceed, by the Cauchy-Schwarz
// inequality over the gradients that both are sums of. States that were rounded can.
MEMSAVE_EXT_INLINE double update_bound(const Options& o, Powers powers) {
  const double ratio = o.beta1 * o.beta1 / o.beta2;
  // Once a power has vanished, as far as it goes.
  const double power = powers.beta2 > 0 ? powers.beta1 * powers.beta1 / powers.beta2 : 0;
  const double bound =
      (1 - o.beta1) * sqrt((1 - powers.beta2) / (1 - o.beta2) * (1 - power) / (1 - ratio));
  return bound > 0 && (powers.beta2 > 0 || ratio < 1) ? bound * 1.0001 : 1e30;
}

MEMSAVE_EXT_INLINE Coefficients<double> coefficients(const Options& o, double lr, Powers powers,
                                                     Phase phase = Phase::kWhole,
                                                     double factor = 1) {
  Coefficients<double> c;
  c.phase = phase;
  c.grad_factor = o.maximize ? -factor : factor;
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
  c.beta1 = o.beta1;
  c.per_exp_avg_weight = 1 / (1 - o.beta1);
  c.update_bound = update_bound(o, powers);
  return c;
}

// convert(double) returns a To.
template <typename To, typename Convert>
MEMSAVE_EXT_INLINE Coefficients<To> convert(const Coefficients<double>& c, const Convert& convert) {
  Coefficients<To> to = {convert(c.grad_factor),
                         convert(c.grad_decay),
                         convert(c.param_decay),
                         convert(c.exp_avg_weight),
                         convert(c.beta2),
                         convert(c.one_minus_beta2),
                         convert(c.bias_correction2_sqrt),
                         convert(c.eps),
                         convert(c.minus_step_size),
                         convert(c.beta1),
                         convert(c.per_exp_avg_weight),
                         convert(c.update_bound),
                         c.decays_grad,
                         c.adds_to_exp_avg,
                         c.phase};
  const bool adds_micro_gradients = c.phase == Phase::kFold || c.phase == Phase::kClose;
  if (!adds_micro_gradients && !c.adds_to_exp_avg) {
    to.exp_avg_weight = to.exp_avg_weight - convert(1.0);
  }
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

// Both moments as they were before a step whose gradients are being folded into exp_avg, which has
// their sum, but not the sum's square: kept in the bits of exp_avg_sq until that is known.
//
// float: the upper 16 bits are exp_avg as a bfloat16, rounded to nearest even; the lower 16 are
// exp_avg_sq without its sign, (bits + the upper 15 of 16 random bits) >> 15. double: the upper 32
// bits are exp_avg as a float, the lower 32 exp_avg_sq, both rounded to nearest.
template <typename T>
struct Packed {
  T exp_avg, exp_avg_sq;
};

// Math: product is rounded and fused(a, b, c) = a * b + c is not, whatever a compiler contracts;
// quotient and square_root are IEEE's or, where a device says so, near them; maximum returns a NaN
// where it is given one; pack(Packed, random) and unpack(T) as above.

template <typename Math, typename T>
MEMSAVE_EXT_INLINE void average_grad(const Coefficients<T>& c, T grad, T& exp_avg) {
  const T base = c.adds_to_exp_avg ? exp_avg : grad;
  exp_avg = Math::fused(c.exp_avg_weight, grad - exp_avg, base);
}

// A micro-gradient of a step that update() closes, with the last one or none.
template <typename Math, typename T, typename Random>
MEMSAVE_EXT_INLINE void fold(const Coefficients<T>& c, T grad, Values<T>& x, Random random) {
  grad = Math::product(grad, c.grad_factor);
  if (c.phase == Phase::kFirstFold) {
    const Packed<T> before = {x.exp_avg, x.exp_avg_sq};
    average_grad<Math>(c, grad, x.exp_avg);
    x.exp_avg_sq = Math::pack(before, random);
  } else {
    x.exp_avg = Math::fused(c.exp_avg_weight, grad, x.exp_avg);
  }
}

// clamps: where the states are rounded so coarsely that a step could be any size.
template <typename Math, bool amsgrad, bool clamps = false, typename T>
MEMSAVE_EXT_INLINE void update(const Coefficients<T>& c, T grad, Values<T>& x) {
  grad = Math::product(grad, c.grad_factor);
  if (c.decays_grad) grad = Math::fused(x.param, c.grad_decay, grad);
  T exp_avg_sq = x.exp_avg_sq;
  if (c.phase == Phase::kClose) {
    const Packed<T> before = Math::unpack(x.exp_avg_sq);
    x.exp_avg = Math::fused(c.exp_avg_weight, grad, x.exp_avg);
    grad = Math::fused(-c.beta1, before.exp_avg, x.exp_avg) * c.per_exp_avg_weight;  // the sum
    exp_avg_sq = before.exp_avg_sq;
  } else {
    average_grad<Math>(c, grad, x.exp_avg);
  }
  x.exp_avg_sq = Math::fused(c.one_minus_beta2 * grad, grad, exp_avg_sq * c.beta2);
  if constexpr (amsgrad) x.max_exp_avg_sq = Math::maximum(x.max_exp_avg_sq, x.exp_avg_sq);
  const T second = amsgrad ? x.max_exp_avg_sq : x.exp_avg_sq;
  const T denominator = Math::quotient(Math::square_root(second), c.bias_correction2_sqrt) + c.eps;
  T exp_avg = x.exp_avg;
  if constexpr (clamps) {
    const T bound = c.update_bound * denominator;
    exp_avg = exp_avg > bound ? bound : exp_avg;
    exp_avg = exp_avg < -bound ? -bound : exp_avg;
  }
  x.param = Math::product(x.param, c.param_decay) +
            Math::quotient(c.minus_step_size * exp_avg, denominator);
}

// What clips a gradient of this norm, as torch.nn.utils.clip_grad_norm_ does.
MEMSAVE_EXT_INLINE double clip_factor(double norm, double max_norm) {
  const double factor = max_norm / (norm + 1e-6);
  return factor > 1 ? 1 : factor;  // also where it is no number
}

}  // namespace memsave_ext::adam
