#include "adam/grad_norm.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/isfinite.h>
#include <ATen/ops/zeros.h>

#include <functional>

namespace memsave_ext::adam {

using at::Tensor;

void GradNorm::add(c10::ArrayRef<Parameter*> parameters) {
  const at::NoGradGuard no_grad;
  std::map<int64_t, std::vector<Tensor>> grads;
  for (const Parameter* parameter : parameters) {
    const bool is_whole = parameter->local.is_same(parameter->tensor);
    grads[is_whole ? 0 : sharding_of(parameter->tensor).number].push_back(parameter->grad);
  }
  for (const auto& [sharding, of_sharding] : grads) {
    const Tensor squares = adam_sum_of_squares(of_sharding);
    Tensor& sum = squares_[sharding].here(squares.device());
    sum = sum.defined() ? sum + squares : squares;
  }
}

Tensor GradNorm::sum_of(int64_t sharding) const {
  Tensor sum;
  const auto found = squares_.find(sharding);
  if (found == squares_.end()) return sum;
  for (const auto& [device, squares] : found->second.combined(std::plus<Tensor>())) {
    sum = sum.defined() ? sum + squares.to(sum.device()) : squares;
  }
  return sum;
}

void GradNorm::finish(double max_norm, const Tensor& grad_scale, c10::ArrayRef<Tensor> sharded) {
  const at::NoGradGuard no_grad;
  Tensor total = sum_of(0);
  for (const Tensor& param : sharded) {
    Tensor sum = sum_of(sharding_of(param).number);
    if (!sum.defined()) sum = at::zeros({}, at::kDouble);
    sum = sum_over_shards(param, sum);
    total = total.defined() ? total + sum.to(total.device()) : sum;
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
