#include "batch_norm/double_backward.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/alias.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/autograd.h>

#include <vector>

#include "batch_norm/activations.h"

namespace memsave_ext::batch_norm {

using at::Tensor;
using torch::autograd::variable_list;

template <>
struct Of<Tensor> {
  static Tensor zero() { return at::zeros({}); }
  static Tensor select(const Tensor& condition, const Tensor& yes, const Tensor& no) {
    return at::where(condition, yes, no);
  }
};

namespace {

// Returns the gradients of input, residual, weight and bias, as differentiable expressions.
variable_list gradients(const Arguments& of) {
  std::vector<int64_t> reduced{0};
  std::vector<int64_t> channel_shape{1, of.input.size(1)};
  for (int64_t d = 2; d < of.input.dim(); ++d) {
    reduced.push_back(d);
    channel_shape.push_back(1);
  }
  const auto type = of.statistics.scalar_type();
  const auto per_channel = [&](const Tensor& tensor) {
    return tensor.to(type).view(channel_shape);
  };
  const auto weighted = [&](const Tensor& tensor) {
    return of.weight.defined() ? tensor * per_channel(of.weight) : tensor;
  };
  const Tensor x = of.input.to(type);
  Tensor mean = per_channel(of.statistics[0]);
  Tensor invstd = per_channel(of.statistics[1]);
  if (of.training) {
    mean = x.mean(reduced, /*keepdim=*/true);
    invstd = (x - mean).square().mean(reduced, /*keepdim=*/true).add(of.eps).rsqrt();
  }
  const Tensor normalized = (x - mean) * invstd;
  const Tensor scale = weighted(invstd);
  Tensor z = weighted(normalized);
  if (of.bias.defined()) z = z + per_channel(of.bias);
  if (of.residual.defined()) z = z + of.residual.to(type);
  const Activation activation = Activations::find(of.activation);
  TORCH_CHECK_NOT_IMPLEMENTED(activation != Activation::kUnlisted,
                              "batch_norm: no double backward of activation '", of.activation, "'");
  const Tensor grad = Activations::backward(activation, of.grad.to(type), z, of.negative_slope);
  const Tensor product = grad * normalized;
  Tensor grad_input = scale * grad;
  if (of.training) {
    grad_input =
        scale * (grad - grad.mean(reduced, true) - normalized * product.mean(reduced, true));
  }
  const auto like = [](const Tensor& gradient, const Tensor& tensor) {
    return tensor.defined() ? gradient.to(tensor.scalar_type()) : gradient;
  };
  return {like(grad_input, of.input), like(grad, of.residual),
          like(product.sum(reduced), of.weight), like(grad.sum(reduced), of.bias)};
}

}  // namespace

variable_list double_backward(const Arguments& inputs, const variable_list& grads) {
  const bool create_graph = at::GradMode::is_enabled();
  const at::AutoGradMode with_graph(true);
  Arguments of = inputs;
  const std::array<Tensor*, 5> sources{&of.grad, &of.input, &of.residual, &of.weight, &of.bias};
  for (Tensor* source : sources) {
    // Differentiates with respect to aliases: where one source depends on another, that path lies
    // outside of this function and must not be counted.
    if (source->defined()) *source = at::alias(*source);
  }
  const variable_list outputs = gradients(of);
  variable_list roots, root_grads;
  for (size_t i = 0; i < outputs.size(); ++i) {
    if (!grads[i].defined() || !outputs[i].requires_grad()) continue;
    roots.push_back(outputs[i]);
    root_grads.push_back(grads[i].to(outputs[i].scalar_type()));
  }
  variable_list wanted;
  std::vector<size_t> positions;
  for (size_t i = 0; i < sources.size(); ++i) {
    if (!sources[i]->defined() || !sources[i]->requires_grad()) continue;
    wanted.push_back(*sources[i]);
    positions.push_back(i);
  }
  variable_list results(sources.size());
  if (roots.empty() || wanted.empty()) return results;
  const variable_list second = torch::autograd::grad(roots, wanted, root_grads, create_graph,
                                                     create_graph, /*allow_unused=*/true);
  for (size_t i = 0; i < second.size(); ++i) results[positions[i]] = second[i];
  return results;
}

}  // namespace memsave_ext::batch_norm
