#include "batch_norm/double_backward.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/alias.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/autograd.h>

#include <vector>

namespace memsave_ext::batch_norm {

using at::Tensor;
using torch::autograd::variable_list;

namespace {

struct Gradients {
  Tensor input, residual, weight, bias;
};

Gradients gradients(const BackwardInputs& of, const Tensor& statistics, bool training, double eps,
                    std::string_view activation, double negative_slope) {
  std::vector<int64_t> reduced{0};
  std::vector<int64_t> channel_shape{1, of.input.size(1)};
  for (int64_t d = 2; d < of.input.dim(); ++d) {
    reduced.push_back(d);
    channel_shape.push_back(1);
  }
  const auto per_channel = [&](const Tensor& tensor) {
    return tensor.to(statistics.scalar_type()).view(channel_shape);
  };
  const Tensor x = of.input.to(statistics.scalar_type());
  Tensor grad = of.grad.to(statistics.scalar_type());
  Tensor mean = per_channel(statistics[0]);
  Tensor invstd = per_channel(statistics[1]);
  if (training) {
    mean = x.mean(reduced, /*keepdim=*/true);
    invstd = (x - mean).square().mean(reduced, /*keepdim=*/true).add(eps).rsqrt();
  }
  const Tensor normalized = (x - mean) * invstd;
  const Tensor scale = of.weight ? invstd * per_channel(*of.weight) : invstd;
  if (activation != "none") {
    Tensor z = of.weight ? normalized * per_channel(*of.weight) : normalized;
    if (of.bias) z = z + per_channel(*of.bias);
    if (of.residual) z = z + of.residual->to(z.scalar_type());
    // Selected as activate_backward selects: no product of 0 and infinity, and NaN passes relu.
    grad = activation == "relu" ? at::where(z <= 0, at::zeros({}, grad.options()), grad)
                                : at::where(z > 0, grad, grad * negative_slope);
  }
  const Tensor product = grad * normalized;
  Tensor grad_input = scale * grad;
  if (training) {
    grad_input =
        scale * (grad - grad.mean(reduced, true) - normalized * product.mean(reduced, true));
  }
  const auto like = [](const Tensor& gradient, const MaybeTensor& tensor) {
    return tensor ? gradient.to(tensor->scalar_type()) : gradient;
  };
  return {like(grad_input, of.input), like(grad, of.residual),
          like(product.sum(reduced), of.weight), like(grad.sum(reduced), of.bias)};
}

}  // namespace

variable_list double_backward(const BackwardInputs& inputs, const Tensor& statistics, bool training,
                              double eps, std::string_view activation, double negative_slope,
                              const variable_list& grads) {
  const bool create_graph = at::GradMode::is_enabled();
  const at::AutoGradMode with_graph(true);
  // Aliases, so that a path from one of them to another outside of here is not counted.
  const auto alias = [](const MaybeTensor& tensor) {
    return given(tensor) ? MaybeTensor(at::alias(*tensor)) : std::nullopt;
  };
  const BackwardInputs of{at::alias(inputs.grad), at::alias(inputs.input), alias(inputs.residual),
                          alias(inputs.weight), alias(inputs.bias)};
  const Gradients first = gradients(of, statistics, training, eps, activation, negative_slope);
  const variable_list outputs{first.input, first.residual, first.weight, first.bias};
  variable_list roots, root_grads;
  for (size_t i = 0; i < outputs.size(); ++i) {
    if (!grads[i].defined() || !outputs[i].requires_grad()) continue;
    roots.push_back(outputs[i]);
    root_grads.push_back(grads[i].to(outputs[i].scalar_type()));
  }
  const std::array<MaybeTensor, 5> sources{of.grad, of.input, of.residual, of.weight, of.bias};
  variable_list wanted;
  std::vector<size_t> positions;
  for (size_t i = 0; i < sources.size(); ++i) {
    if (!given(sources[i]) || !sources[i]->requires_grad()) continue;
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
