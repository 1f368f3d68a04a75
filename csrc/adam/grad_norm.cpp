#include "adam/grad_norm.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/isfinite.h>
#include <ATen/ops/zeros.h>

#include <functional>

namespace memsave_ext::adam {

using at::Tensor;

void GradNorm::add(c10::ArrayRef<Tensor> grads) {
  if (grads.empty()) return;
  const at::NoGradGuard no_grad;
  const Tensor squares = sum_of_squares(grads);
  Tensor& sum = squares_.here(squares.device());
  sum = sum.defined() ? sum + squares : squares;
}

void GradNorm::finish(double max_norm, const Tensor& grad_scale) {
  const at::NoGradGuard no_grad;
  Tensor total;
  for (const auto& [device, squares] : squares_.combined(std::plus<Tensor>())) {
    total = total.defined() ? total + squares.to(total.device()) : squares;
  }
  if (!total.defined()) total = at::zeros({}, at::kDouble);
  Tensor norm = total.sqrt(), scale;
  if (grad_scale.defined()) {
    scale = grad_scale.to(norm.device(), at::kDouble);
    norm = norm / scale;
    skip_ = norm.isfinite().logical_not().to(at::kFloat);
  }
  // The factor of torch.nn.utils.clip_grad_norm_.
  Tensor factor = (max_norm / (norm + 1e-6)).clamp_max(1);
  if (scale.defined()) factor = factor / scale;
  norm_ = norm.to(at::kFloat);
  factor_ = factor;
  made_on_ = current_stream(factor.device());
}

Scaling GradNorm::scaling(c10::Device device) const {
  use_here(factor_, made_on_);
  if (skip_.defined()) use_here(skip_, made_on_);
  return {{}, {}, factor_.to(device), skip_.defined() ? skip_.to(device) : Tensor()};
}

}  // namespace memsave_ext::adam
