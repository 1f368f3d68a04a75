// Autograd of the batch_norm operators.
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/grad_mode.h>
#include <ATen/core/stack.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/full.h>
#include <torch/csrc/autograd/VariableTypeUtils.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/csrc/autograd/functions/basic_ops.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/library.h>

#include <array>
#include <utility>

#include "batch_norm/arguments.h"
#include "batch_norm/double_backward.h"
#include "batch_norm/group.h"
#include "compat.h"

namespace memsave_ext::batch_norm {
namespace {

using at::Tensor;
using torch::autograd::SavedVariable;
using torch::autograd::variable_list;
using torch::jit::Stack;

// The arguments of an operator that its node saves for backward.
class Saved {
 public:
  // The gradients need bias and residual only for the sign of the value before the activation, so
  // without an activation these two are not saved.
  void save(const Arguments& of, const Tensor& statistics) {
    grad_ = SavedVariable(of.grad, false);
    input_ = SavedVariable(of.input, false);
    statistics_ = SavedVariable(statistics, false);
    weight_ = SavedVariable(of.weight, false);
    if (of.activation != "none") {
      bias_ = SavedVariable(of.bias, false);
      residual_ = SavedVariable(of.residual, false);
    }
    options_ = of;
  }
  Arguments unpack() const {
    Arguments of{options_};
    of.grad = grad_.unpack();
    of.input = input_.unpack();
    of.statistics = statistics_.unpack();
    of.weight = weight_.unpack();
    of.bias = bias_.unpack();
    of.residual = residual_.unpack();
    return of;
  }
  void release() {
    for (auto* saved : {&grad_, &input_, &statistics_, &weight_, &bias_, &residual_}) {
      saved->reset_data();
    }
  }

 private:
  SavedVariable grad_, input_, statistics_, weight_, bias_, residual_;
  Options options_;
};

struct SavingNode : torch::autograd::Node {
  Saved saved;

  void release_variables() override {
    const std::lock_guard<std::mutex> lock(mutex_);
    saved.release();
  }

 protected:
  static variable_list only(const c10::List<bool>& mask, variable_list results) {
    for (size_t i = 0; i < results.size(); ++i) {
      if (!mask[i]) results[i] = Tensor();
    }
    return results;
  }
};

// Returns a node with edges to the tensors, or null where none of them requires a gradient.
template <typename Node, typename... Tensors>
auto node_for(const Tensors&... tensors) {
  for (const Tensor* tensor : {&tensors...}) {
    TORCH_CHECK_NOT_IMPLEMENTED(!torch::autograd::isFwGradDefined(*tensor),
                                "memsave_ext: batch_norm has no forward-mode derivative");
  }
  decltype(make_node<Node>()) node;
  if (torch::autograd::compute_requires_grad(tensors...)) {
    node = make_node<Node>();
    node->set_next_edges(torch::autograd::collect_next_edges(tensors...));
  }
  return node;
}

void call_below(const c10::OperatorHandle& op, Stack* stack) {
  const at::AutoDispatchBelowADInplaceOrView below;
  op.callBoxed(stack);
}

// Differentiates batch_norm_backward. Its edges: grad, input, residual, weight, bias.
struct BackwardNode : SavingNode {
  std::string name() const override { return "BatchNormBackwardBackward"; }
  variable_list apply(variable_list&& grads) override {
    const std::lock_guard<std::mutex> lock(mutex_);
    const Arguments of = saved.unpack();
    return double_backward(of, only(of.output_mask, std::move(grads)));
  }
};

void differentiable_backward(const c10::OperatorHandle& handle, Stack* stack) {
  static const Operator op(handle);
  const Arguments of = op.read(*stack);
  auto node = node_for<BackwardNode>(of.grad, of.input, of.residual, of.weight, of.bias);
  call_below(handle, stack);
  if (!node) return;
  node->saved.save(of, of.statistics);
  variable_list results;
  for (const auto& result : torch::jit::last(*stack, 4)) results.push_back(result.toTensor());
  torch::autograd::set_history(results, node);
}

// Differentiates batch_norm_forward. Its edges: input, residual, weight, bias.
struct ForwardNode : SavingNode {
  std::string name() const override { return "BatchNormBackward"; }
  variable_list apply(variable_list&& grads) override {
    static const Operator op("memsave_ext::batch_norm_backward");
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!grads[0].defined()) return variable_list(4);
    Arguments of = saved.unpack();
    of.grad = grads[0];
    of.output_mask = c10::List<bool>();
    for (size_t i = 0; i < 4; ++i) of.output_mask.push_back(task_should_compute_output(i));
    return only(of.output_mask, of.group ? reduced_backward(of) : op(of));
  }

 private:
  // The gradients where statistics are those of several processes. One collective carries the sums
  // and the number of values that they are over.
  static variable_list reduced_backward(Arguments& of) {
    static const Operator sums_op("memsave_ext::batch_norm_backward_sums");
    static const Operator input_op("memsave_ext::batch_norm_backward_input");
    const bool create_graph = at::GradMode::is_enabled();
    const at::NoGradGuard no_grad;
    const Tensor sums = sums_op(of)[0];
    const Tensor count = at::full({1}, of.input.numel() / of.input.size(1), sums.options());
    const Tensor total = sum_over_group(at::cat({sums.flatten(), count}), *of.group);
    const int64_t channels = of.input.size(1);
    of.means =
        total.narrow(0, 0, 2 * channels).div(total.narrow(0, 2 * channels, 1)).view({2, channels});
    const auto gradients = input_op(of);
    variable_list results = only(of.output_mask, {gradients[0], gradients[1], sums[1], sums[0]});
    if (create_graph) forbid_double_backward(results, of);
    return results;
  }

  static void forbid_double_backward(const variable_list& results, const Arguments& of) {
    auto node = make_node<torch::autograd::Error>(
        "memsave_ext.SyncBatchNorm does not support double backward");
    node->set_next_edges(torch::autograd::collect_next_edges(of.grad, of.input));
    for (const auto& result : results) {
      if (result.defined()) torch::autograd::set_history(result, node);
    }
  }
};

void differentiable_forward(const c10::OperatorHandle& handle, Stack* stack) {
  static const Operator op(handle);
  const Arguments of = op.read(*stack);
  auto node = node_for<ForwardNode>(of.input, of.residual, of.weight, of.bias);
  // Known statistics are saved before the kernel runs: the recompute of a checkpoint stops at the
  // last tensor that is saved, and then needs no kernel.
  const bool known = of.statistics.defined();
  if (node && known) node->saved.save(of, of.statistics);
  call_below(handle, stack);
  if (of.training && !known) {
    for (const auto* buffer : {&of.running_mean, &of.running_var}) {
      if (buffer->defined()) torch::autograd::increment_version(*buffer);
    }
  }
  if (!node) return;
  if (!known) node->saved.save(of, torch::jit::peek(*stack, 1, 2).toTensor());
  torch::autograd::set_history(torch::jit::peek(*stack, 0, 2).toTensor(), node);
}

}  // namespace
}  // namespace memsave_ext::batch_norm

TORCH_LIBRARY_IMPL(memsave_ext, Autograd, library) {
  using namespace memsave_ext::batch_norm;
  library.impl("batch_norm_forward",
               torch::CppFunction::makeFromBoxedFunction<&differentiable_forward>());
  library.impl("batch_norm_backward",
               torch::CppFunction::makeFromBoxedFunction<&differentiable_backward>());
  for (const char* name :
       {"batch_norm_moments", "batch_norm_backward_sums", "batch_norm_backward_input"}) {
    library.impl(name, torch::autograd::autogradNotImplementedFallback());
  }
}
