// Autograd of the batch_norm operators.
#include <ATen/TensorOperators.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/grad_mode.h>
#include <ATen/core/stack.h>
#include <ATen/ops/alias.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/full.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/VariableTypeUtils.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/csrc/autograd/functions/basic_ops.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/library.h>

#include <array>
#include <string>
#include <utility>
#include <vector>

#include "batch_norm/activations.h"
#include "batch_norm/arguments.h"
#include "compat.h"

namespace memsave_ext::batch_norm {

using at::Tensor;
using torch::autograd::SavedVariable;
using torch::autograd::variable_list;
using torch::jit::Stack;

template <>
struct Values<Tensor> {
  static Tensor zero() { return at::zeros({}); }
  static Tensor select(const Tensor& condition, const Tensor& yes, const Tensor& no) {
    return at::where(condition, yes, no);
  }
};

namespace {

// Returns the sum over the processes of a torch.distributed group. Calls the operators boxed,
// because the C++ types of these two differ between versions of torch.
Tensor sum_over_group(const Tensor& tensor, const std::string& group) {
  auto& dispatcher = c10::Dispatcher::singleton();
  static const auto all_reduce = dispatcher.findSchemaOrThrow("_c10d_functional::all_reduce", "");
  static const auto wait = dispatcher.findSchemaOrThrow("_c10d_functional::wait_tensor", "");
  torch::jit::Stack stack{tensor, std::string("sum"), group};
  all_reduce.callBoxed(stack);
  wait.callBoxed(stack);
  return stack.front().toTensor();
}

// Returns the gradients of input, residual, weight and bias, as differentiable expressions.
variable_list gradients(const Arguments& args) {
  std::vector<int64_t> reduced{0};
  std::vector<int64_t> channel_shape{1, args.input.size(1)};
  for (int64_t d = 2; d < args.input.dim(); ++d) {
    reduced.push_back(d);
    channel_shape.push_back(1);
  }
  const auto type = args.statistics.scalar_type();
  const auto per_channel = [&](const Tensor& tensor) {
    return tensor.to(type).view(channel_shape);
  };
  const auto weighted = [&](const Tensor& tensor) {
    return args.weight.defined() ? tensor * per_channel(args.weight) : tensor;
  };
  const Tensor x = args.input.to(type);
  Tensor mean = per_channel(args.statistics[0]);
  Tensor invstd = per_channel(args.statistics[1]);
  if (args.training) {
    mean = x.mean(reduced, /*keepdim=*/true);
    invstd = (x - mean).square().mean(reduced, /*keepdim=*/true).add(args.eps).rsqrt();
  }
  const Tensor normalized = (x - mean) * invstd;
  const Tensor scale = weighted(invstd);
  Tensor z = weighted(normalized);
  if (args.bias.defined()) z = z + per_channel(args.bias);
  if (args.residual.defined()) z = z + args.residual.to(type);
  const Activation activation = Activations::find(args.activation);
  TORCH_CHECK_NOT_IMPLEMENTED(activation != Activation::kUnlisted,
                              "batch_norm: no double backward of activation '", args.activation,
                              "'");
  const Tensor grad = Activations::backward(activation, args.grad.to(type), z, args.negative_slope);
  const Tensor product = grad * normalized;
  Tensor grad_input = scale * grad;
  if (args.training) {
    grad_input =
        scale * (grad - grad.mean(reduced, true) - normalized * product.mean(reduced, true));
  }
  const auto like = [](const Tensor& gradient, const Tensor& tensor) {
    return tensor.defined() ? gradient.to(tensor.scalar_type()) : gradient;
  };
  return {like(grad_input, args.input), like(grad, args.residual),
          like(product.sum(reduced), args.weight), like(grad.sum(reduced), args.bias)};
}

// The second derivative, which is rarely asked for. Computes the gradients again with torch's own
// operators, which autograd can differentiate any number of times.
//
// Differentiates batch_norm_backward, whose arguments are `inputs`. `grads` are the gradients of
// its four results. Returns the gradients of grad, input, residual, weight and bias.
variable_list double_backward(const Arguments& inputs, const variable_list& grads) {
  const bool create_graph = at::GradMode::is_enabled();
  const at::AutoGradMode with_graph(true);
  Arguments args = inputs;
  const std::array<Tensor*, 5> sources{&args.grad, &args.input, &args.residual, &args.weight,
                                       &args.bias};
  for (Tensor* source : sources) {
    // Differentiates with respect to aliases: where one source depends on another, that path lies
    // outside of this function and must not be counted.
    if (source->defined()) *source = at::alias(*source);
  }
  const variable_list outputs = gradients(args);
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

// The arguments of an operator that its node saves for backward.
class Saved {
 public:
  // The gradients need bias and residual only for the sign of the value before the activation, so
  // without an activation these two are not saved.
  void save(const Arguments& args) {
    grad_ = SavedVariable(args.grad, false);
    input_ = SavedVariable(args.input, false);
    weight_ = SavedVariable(args.weight, false);
    if (args.activation != "none") {
      bias_ = SavedVariable(args.bias, false);
      residual_ = SavedVariable(args.residual, false);
    }
    options_ = args;
  }
  void save_statistics(const Tensor& statistics) { statistics_ = SavedVariable(statistics, false); }
  Arguments unpack() const {
    Arguments args{options_};
    args.grad = grad_.unpack();
    args.input = input_.unpack();
    args.statistics = statistics_.unpack();
    args.weight = weight_.unpack();
    args.bias = bias_.unpack();
    args.residual = residual_.unpack();
    return args;
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
    const Arguments args = saved.unpack();
    return double_backward(args, only(args.output_mask, std::move(grads)));
  }
};

void differentiable_backward(const c10::OperatorHandle& handle, Stack* stack) {
  static const Operator op(handle);
  const Arguments args = op.read(*stack);
  auto node = node_for<BackwardNode>(args.grad, args.input, args.residual, args.weight, args.bias);
  call_below(handle, stack);
  if (!node) return;
  node->saved.save(args);
  node->saved.save_statistics(args.statistics);
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
    Arguments args = saved.unpack();
    args.grad = grads[0];
    args.output_mask = c10::List<bool>();
    for (size_t i = 0; i < 4; ++i) args.output_mask.push_back(task_should_compute_output(i));
    return only(args.output_mask, args.group ? reduced_backward(args) : op(args));
  }

 private:
  // The gradients where statistics are those of several processes. One collective carries the sums
  // and the number of values that they are over.
  static variable_list reduced_backward(Arguments& args) {
    static const Operator sums_op("memsave_ext::batch_norm_backward_sums");
    static const Operator input_op("memsave_ext::batch_norm_backward_input");
    const bool create_graph = at::GradMode::is_enabled();
    const at::NoGradGuard no_grad;
    const Tensor sums = sums_op(args)[0];
    const Tensor count = at::full({1}, args.count(), sums.options());
    const Tensor total = sum_over_group(at::cat({sums.flatten(), count}), *args.group);
    const int64_t channels = args.input.size(1);
    args.means =
        total.narrow(0, 0, 2 * channels).div(total.narrow(0, 2 * channels, 1)).view({2, channels});
    const auto gradients = input_op(args);
    variable_list results = only(args.output_mask, {gradients[0], gradients[1], sums[1], sums[0]});
    if (create_graph) forbid_double_backward(results, args);
    return results;
  }

  static void forbid_double_backward(const variable_list& results, const Arguments& args) {
    auto node = make_node<torch::autograd::Error>(
        "memsave_ext.SyncBatchNorm does not support double backward");
    node->set_next_edges(torch::autograd::collect_next_edges(args.grad, args.input));
    for (const auto& result : results) {
      if (result.defined()) torch::autograd::set_history(result, node);
    }
  }
};

void differentiable_forward(const c10::OperatorHandle& handle, Stack* stack) {
  static const Operator op(handle);
  const Arguments args = op.read(*stack);
  auto node = node_for<ForwardNode>(args.input, args.residual, args.weight, args.bias);
  // What can be is saved before the kernel runs: where a tensor cannot be saved, nothing was
  // updated; and the recompute of a checkpoint stops at the last tensor that is saved, with known
  // statistics before the kernel.
  const bool known = args.statistics.defined();
  if (node) node->saved.save(args);
  if (node && known) node->saved.save_statistics(args.statistics);
  call_below(handle, stack);
  if (args.training && !known) {
    for (const auto* buffer : {&args.running_mean, &args.running_var}) {
      if (buffer->defined()) torch::autograd::increment_version(*buffer);
    }
  }
  if (!node) return;
  if (!known) node->saved.save_statistics(torch::jit::peek(*stack, 1, 2).toTensor());
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
