// Autograd of the batch_norm operators.
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/full.h>
#include <torch/csrc/autograd/VariableTypeUtils.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/csrc/autograd/functions/basic_ops.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/library.h>

#include <array>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>

#include "batch_norm/call.h"
#include "batch_norm/double_backward.h"
#include "batch_norm/group.h"
#include "compat.h"

namespace memsave_ext::batch_norm {
namespace {

using at::Tensor;
using torch::autograd::SavedVariable;
using torch::autograd::variable_list;

using Forward = std::tuple<Tensor, Tensor>(const Tensor&, const MaybeTensor&, const MaybeTensor&,
                                           const MaybeTensor&, const MaybeTensor&,
                                           const MaybeTensor&, const MaybeTensor&, bool, double,
                                           double, std::string_view, double,
                                           std::optional<std::string_view>);
using Backward = std::tuple<Tensor, Tensor, Tensor, Tensor>(const Tensor&, const Tensor&,
                                                            const MaybeTensor&, const MaybeTensor&,
                                                            const MaybeTensor&, const Tensor&, bool,
                                                            double, std::string_view, double,
                                                            std::array<bool, 4>);
using BackwardSums = Tensor(const Tensor&, const Tensor&, const MaybeTensor&, const MaybeTensor&,
                            const MaybeTensor&, const Tensor&, std::string_view, double);
using BackwardInput = std::tuple<Tensor, Tensor>(const Tensor&, const Tensor&, const MaybeTensor&,
                                                 const MaybeTensor&, const MaybeTensor&,
                                                 const Tensor&, const Tensor&, std::string_view,
                                                 double, std::array<bool, 2>);

template <typename Signature>
c10::TypedOperatorHandle<Signature> find(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>();
}

void check_no_forward_gradient(std::initializer_list<const Tensor*> tensors) {
  for (const Tensor* tensor : tensors) {
    TORCH_CHECK_NOT_IMPLEMENTED(!torch::autograd::isFwGradDefined(*tensor),
                                "memsave_ext: batch_norm has no forward-mode derivative");
  }
}

MaybeTensor maybe(Tensor tensor) {
  return tensor.defined() ? MaybeTensor(std::move(tensor)) : std::nullopt;
}

struct Options {
  bool training;
  double eps;
  std::string activation;
  double negative_slope;
};

// What both nodes keep. Weight is used by every gradient; bias and residual only by the sign of the
// value before the activation.
class SavedTensors {
 public:
  struct Unpacked {
    Tensor input, statistics;
    MaybeTensor weight, bias, residual;
  };

  void save(const Tensor& input, const Tensor& statistics, const MaybeTensor& weight,
            const MaybeTensor& bias, const MaybeTensor& residual, const std::string& activation) {
    input_ = SavedVariable(input, false);
    statistics_ = SavedVariable(statistics, false);
    if (given(weight)) weight_ = SavedVariable(*weight, false);
    if (activation == "none") return;
    if (given(bias)) bias_ = SavedVariable(*bias, false);
    if (given(residual)) residual_ = SavedVariable(*residual, false);
  }
  Unpacked unpack() const {
    return {input_.unpack(), statistics_.unpack(), maybe(weight_.unpack()), maybe(bias_.unpack()),
            maybe(residual_.unpack())};
  }
  void release() {
    for (auto* saved : {&input_, &statistics_, &weight_, &bias_, &residual_}) saved->reset_data();
  }

 private:
  SavedVariable input_, statistics_, weight_, bias_, residual_;
};

// Differentiates batch_norm_backward: inputs grad, input, residual, weight, bias.
struct BackwardNode : torch::autograd::Node {
  SavedVariable grad;
  SavedTensors saved;
  Options options;
  std::array<bool, 4> output_mask;

  std::string name() const override { return "BatchNormBackwardBackward"; }
  void release_variables() override {
    const std::lock_guard<std::mutex> lock(mutex_);
    grad.reset_data();
    saved.release();
  }
  variable_list apply(variable_list&& grads) override {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (size_t i = 0; i < output_mask.size(); ++i) {
      if (!output_mask[i]) grads[i] = Tensor();
    }
    auto of = saved.unpack();
    return double_backward({grad.unpack(), of.input, of.residual, of.weight, of.bias},
                           of.statistics, options.training, options.eps, options.activation,
                           options.negative_slope, grads);
  }
};

std::tuple<Tensor, Tensor, Tensor, Tensor> differentiable_backward(
    const Tensor& grad, const Tensor& input, const MaybeTensor& weight, const MaybeTensor& bias,
    const MaybeTensor& residual, const Tensor& statistics, bool training, double eps,
    std::string_view activation, double negative_slope, std::array<bool, 4> mask) {
  static const auto op = find<Backward>("memsave_ext::batch_norm_backward");
  const Tensor residual_ = residual.value_or(Tensor());
  const Tensor weight_ = weight.value_or(Tensor());
  const Tensor bias_ = bias.value_or(Tensor());
  check_no_forward_gradient({&grad, &input, &residual_, &weight_, &bias_});
  const bool differentiable =
      torch::autograd::compute_requires_grad(grad, input, residual_, weight_, bias_);
  auto results = [&] {
    const at::AutoDispatchBelowADInplaceOrView below;
    return op.call(grad, input, weight, bias, residual, statistics, training, eps, activation,
                   negative_slope, mask);
  }();
  if (!differentiable) return results;
  auto node = make_node<BackwardNode>();
  node->set_next_edges(torch::autograd::collect_next_edges(grad, input, residual_, weight_, bias_));
  node->options = {training, eps, std::string(activation), negative_slope};
  node->output_mask = mask;
  node->grad = SavedVariable(grad, false);
  node->saved.save(input, statistics, weight, bias, residual, node->options.activation);
  torch::autograd::set_history(variable_list{std::get<0>(results), std::get<1>(results),
                                             std::get<2>(results), std::get<3>(results)},
                               node);
  return results;
}

// Differentiates batch_norm_forward: inputs input, residual, weight, bias.
struct ForwardNode : torch::autograd::Node {
  SavedTensors saved;
  Options options;
  std::optional<std::string> group;

  std::string name() const override { return "BatchNormBackward"; }
  void release_variables() override {
    const std::lock_guard<std::mutex> lock(mutex_);
    saved.release();
  }
  variable_list apply(variable_list&& grads) override {
    static const auto op = find<Backward>("memsave_ext::batch_norm_backward");
    const std::lock_guard<std::mutex> lock(mutex_);
    const Tensor& grad = grads[0];
    const std::array<bool, 4> mask{task_should_compute_output(0), task_should_compute_output(1),
                                   task_should_compute_output(2), task_should_compute_output(3)};
    if (!grad.defined()) return variable_list(4);
    auto of = saved.unpack();
    if (group) return reduced_backward(grad, of, mask);
    const auto results =
        op.call(grad, of.input, of.weight, of.bias, of.residual, of.statistics, options.training,
                options.eps, options.activation, options.negative_slope, mask);
    return only(mask, {std::get<0>(results), std::get<1>(results), std::get<2>(results),
                       std::get<3>(results)});
  }

 private:
  static variable_list only(const std::array<bool, 4>& mask, variable_list results) {
    for (size_t i = 0; i < results.size(); ++i) {
      if (!mask[i]) results[i] = Tensor();
    }
    return results;
  }

  // One collective, of the sums and, beside them, the number of values they are over.
  variable_list reduced_backward(const Tensor& grad, const SavedTensors::Unpacked& of,
                                 const std::array<bool, 4>& mask) {
    static const auto sums_op = find<BackwardSums>("memsave_ext::batch_norm_backward_sums");
    static const auto input_op = find<BackwardInput>("memsave_ext::batch_norm_backward_input");
    const bool create_graph = at::GradMode::is_enabled();
    const at::NoGradGuard no_grad;
    const Tensor sums = sums_op.call(grad, of.input, of.weight, of.bias, of.residual, of.statistics,
                                     options.activation, options.negative_slope);
    const Tensor count = at::full({1}, of.input.numel() / of.input.size(1), sums.options());
    const Tensor total = sum_over_group(at::cat({sums.flatten(), count}), *group);
    const int64_t channels = of.input.size(1);
    const Tensor means =
        total.narrow(0, 0, 2 * channels).div(total.narrow(0, 2 * channels, 1)).view({2, channels});
    const auto [grad_input, grad_residual] =
        input_op.call(grad, of.input, of.weight, of.bias, of.residual, of.statistics, means,
                      options.activation, options.negative_slope, {mask[0], mask[1]});
    auto results = only(mask, {grad_input, grad_residual, sums[1], sums[0]});
    return create_graph ? forbid_double_backward(std::move(results), grad, of) : results;
  }

  static variable_list forbid_double_backward(variable_list results, const Tensor& grad,
                                              const SavedTensors::Unpacked& of) {
    auto node = make_node<torch::autograd::Error>(
        "memsave_ext.SyncBatchNorm does not support double backward");
    node->set_next_edges(torch::autograd::collect_next_edges(grad, of.input));
    for (auto& result : results) {
      if (result.defined()) torch::autograd::set_history(result, node);
    }
    return results;
  }
};

std::tuple<Tensor, Tensor> differentiable_forward(
    const Tensor& input, const MaybeTensor& weight, const MaybeTensor& bias,
    const MaybeTensor& residual, const MaybeTensor& statistics, const MaybeTensor& running_mean,
    const MaybeTensor& running_var, bool training, double momentum, double eps,
    std::string_view activation, double negative_slope, std::optional<std::string_view> group) {
  static const auto op = find<Forward>("memsave_ext::batch_norm_forward");
  const Tensor residual_ = residual.value_or(Tensor());
  const Tensor weight_ = weight.value_or(Tensor());
  const Tensor bias_ = bias.value_or(Tensor());
  check_no_forward_gradient({&input, &residual_, &weight_, &bias_});
  decltype(make_node<ForwardNode>()) node;
  if (torch::autograd::compute_requires_grad(input, residual_, weight_, bias_)) {
    node = make_node<ForwardNode>();
    node->set_next_edges(torch::autograd::collect_next_edges(input, residual_, weight_, bias_));
    node->options = {training, eps, std::string(activation), negative_slope};
    if (group) node->group = std::string(*group);
  }
  const auto save = [&](const Tensor& used) {
    node->saved.save(input, used, weight, bias, residual, node->options.activation);
  };
  // Before the kernel where they are known: the recompute of a checkpoint stops at the last tensor
  // that is saved, and then needs no kernel.
  const bool known = statistics.has_value() && statistics->defined();
  if (node && known) save(*statistics);
  auto results = [&] {
    const at::AutoDispatchBelowADInplaceOrView below;
    return op.call(input, weight, bias, residual, statistics, running_mean, running_var, training,
                   momentum, eps, activation, negative_slope, group);
  }();
  if (training && !known) {
    for (const auto* buffer : {&running_mean, &running_var}) {
      if (given(*buffer)) torch::autograd::increment_version(**buffer);
    }
  }
  if (node && !known) save(std::get<1>(results));
  if (node) torch::autograd::set_history(std::get<0>(results), node);
  return results;
}

}  // namespace
}  // namespace memsave_ext::batch_norm

TORCH_LIBRARY_IMPL(memsave_ext, Autograd, library) {
  using namespace memsave_ext::batch_norm;
  library.impl("batch_norm_forward", differentiable_forward);
  library.impl("batch_norm_backward", differentiable_backward);
  for (const char* name :
       {"batch_norm_moments", "batch_norm_backward_sums", "batch_norm_backward_input"}) {
    library.impl(name, torch::autograd::autogradNotImplementedFallback());
  }
}
