// The arithmetic of a step, the same for CPU and CUDA: Adam (Kingma and Ba 2015, arXiv 1412.6980),
// decoupled weight decay (Loshchilov and Hutter 2019, arXiv 1711.05101) and amsgrad (Reddi et al.
// 2018). The operations, their order and where they are fused are those of torch's fused Adam on
// CPUs with fused multiply-add, so results are bit-identical to it.
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

// A step is made whole, or in parts (optimizer accumulation): micro-gradients are folded into the
// moments, and kClose, with the last of them, updates the parameter.
enum class StepPhase : int { kWhole, kFirstFold, kFold, kClose };

// Whether the phase changes the moments only: the parameter and the step count stay as they are.
MEMSAVE_EXT_INLINE bool is_fold(StepPhase phase) {
  return phase == StepPhase::kFirstFold || phase == StepPhase::kFold;
}

// beta1^step and beta2^step, for bias correction.
struct Powers {
  double beta1;
  double beta2;
};

MEMSAVE_EXT_INLINE Powers powers(const Options& o, double step) {
  return {pow(o.beta1, step), pow(o.beta2, step)};
}

// The constants of a step that all elements of a tensor share. T: a scalar or a vector.
template <typename T>
struct Coefficients {
  T grad_factor;
  T grad_decay;      // grad_decay * param is added to the gradient where decays_grad
  T param_decay;     // decoupled weight decay: the parameter is multiplied by it; 1 without
  T exp_avg_weight;  // of grad - exp_avg in average_grad(); of grad in kFold and kClose
  T beta2;
  T one_minus_beta2;
  T bias_correction2_sqrt;
  T eps;
  T minus_step_size;
  T beta1;
  T per_exp_avg_weight;  // 1 / (1 - beta1)
  T update_bound;        // bound of |exp_avg| / denominator; see update_bound()
  bool decays_grad;
  bool adds_to_exp_avg;  // else to the gradient, so that a beta1 of 0 gives just the gradient
  StepPhase phase;
};

// Returns the largest possible exp_avg / (sqrt(exp_avg_sq) / bias_correction2_sqrt), by the
// Cauchy-Schwarz inequality over the gradients that both are sums of. Rounded states can exceed it.
MEMSAVE_EXT_INLINE double update_bound(const Options& o, Powers powers) {
  const double ratio = o.beta1 * o.beta1 / o.beta2;
  // Once beta2^step has underflowed, 0: the limit for ratio < 1. There is no bound otherwise.
  const double power = powers.beta2 > 0 ? powers.beta1 * powers.beta1 / powers.beta2 : 0;
  const double bound =
      (1 - o.beta1) * sqrt((1 - powers.beta2) / (1 - o.beta2) * (1 - power) / (1 - ratio));
  return bound > 0 && (powers.beta2 > 0 || ratio < 1) ? bound * 1.0001 : 1e30;
}

MEMSAVE_EXT_INLINE Coefficients<double> coefficients(const Options& o, double lr, Powers powers,
                                                     StepPhase phase = StepPhase::kWhole,
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
                         convert(c.eps),
                         convert(c.minus_step_size),
                         convert(c.beta1),
                         convert(c.per_exp_avg_weight),
                         convert(c.update_bound),
                         c.decays_grad,
                         c.adds_to_exp_avg,
                         c.phase};
  const bool adds_micro_gradients = c.phase == StepPhase::kFold || c.phase == StepPhase::kClose;
  if (!adds_micro_gradients && !c.adds_to_exp_avg) {
    to.exp_avg_weight = to.exp_avg_weight - convert(1.0);
  }
  return to;
}

// The values that a step changes.
template <typename T>
struct Values {
  T param;
  T exp_avg;
  T exp_avg_sq;
  T max_exp_avg_sq;  // only with amsgrad
};

// Both moments as they were before the step whose gradients are being folded. exp_avg takes up the
// sum of the gradients, but exp_avg_sq needs the square of that sum, which is known only at the
// end. Until then the bits of exp_avg_sq hold both earlier moments.
//
// float: the upper 16 bits are exp_avg as a bfloat16, rounded to nearest even; the lower 16 are
// exp_avg_sq without its sign, (bits + the upper 15 of 16 random bits) >> 15. double: the upper 32
// bits are exp_avg as a float, the lower 32 are exp_avg_sq as a float, both rounded to nearest.
template <typename T>
struct Packed {
  T exp_avg, exp_avg_sq;
};

// What Math must have: product(), whose result is rounded, and fused(a, b, c) = a * b + c, whose
// product is not, whatever the compiler contracts; quotient() and square_root(), which are IEEE's
// or, where a device says so, near them; maximum(), which returns NaN where either argument is NaN;
// and pack(Packed, random) and unpack(T), which convert as described at Packed.

// exp_avg = beta1 * exp_avg + (1 - beta1) * grad.
template <typename Math, typename T>
MEMSAVE_EXT_INLINE void average_grad(const Coefficients<T>& c, T grad, T& exp_avg) {
  const T base = c.adds_to_exp_avg ? exp_avg : grad;
  exp_avg = Math::fused(c.exp_avg_weight, grad - exp_avg, base);
}

// Folds a micro-gradient into the moments. update() closes the step, with the last micro-gradient
// or with none.
template <typename Math, typename T, typename Random>
MEMSAVE_EXT_INLINE void fold(const Coefficients<T>& c, T grad, Values<T>& x, Random random) {
  grad = Math::product(grad, c.grad_factor);
  if (c.phase == StepPhase::kFirstFold) {
    const Packed<T> before = {x.exp_avg, x.exp_avg_sq};
    average_grad<Math>(c, grad, x.exp_avg);
    x.exp_avg_sq = Math::pack(before, random);
  } else {
    x.exp_avg = Math::fused(c.exp_avg_weight, grad, x.exp_avg);
  }
}

// Makes a step. `clamps` bounds it, for states that are rounded so coarsely that it could otherwise
// be of any size.
template <typename Math, bool amsgrad, bool clamps = false, typename T>
MEMSAVE_EXT_INLINE void update(const Coefficients<T>& c, T grad, Values<T>& x) {
  grad = Math::product(grad, c.grad_factor);
  if (c.decays_grad) grad = Math::fused(x.param, c.grad_decay, grad);
  T exp_avg_sq = x.exp_avg_sq;
  if (c.phase == StepPhase::kClose) {
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

// Returns the factor that clips a gradient of this norm, like torch.nn.utils.clip_grad_norm_.
MEMSAVE_EXT_INLINE double clip_factor(double norm, double max_norm) {
  const double factor = max_norm / (norm + 1e-6);
  return factor > 1 ? 1 : factor;  // NaN stays NaN
}

}  // namespace memsave_ext::adam
