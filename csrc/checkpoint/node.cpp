#include "checkpoint/node.h"

#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/functions/basic_ops.h>
#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>

#include "checkpoint/boundary.h"
#include "checkpoint/call.h"
#include "checkpoint/errors.h"

namespace memsave_ext {

namespace py = pybind11;
using torch::autograd::Edge;
using torch::autograd::edge_list;
using torch::autograd::variable_list;
namespace impl = torch::autograd::impl;

// What one backward works with.
struct CheckpointNode::Saved {
  variable_list inputs;
  std::vector<ListedParameter> parameters;
  Surroundings surroundings;
};

// The graph of a recompute: where it starts, with which gradients, and where the gradients of the
// listed tensors are to be captured (an invalid edge where none is wanted).
struct CheckpointNode::Recomputed {
  edge_list roots;
  variable_list root_grads;
  edge_list targets;
};

CheckpointNode::CheckpointNode(py::object function,
                               std::vector<torch::autograd::SavedVariable> inputs,
                               std::vector<py::object> input_types,
                               std::vector<ListedParameter> parameters, OutsideTensors outside,
                               Surroundings surroundings, ForwardRecord record, CallSite call_site,
                               edge_list next_edges)
    : Node(std::move(next_edges)),
      function_(std::move(function)),
      inputs_(std::move(inputs)),
      input_types_(std::move(input_types)),
      parameters_(std::move(parameters)),
      outside_(std::move(outside)),
      surroundings_(std::move(surroundings)),
      forward_record_(std::move(record)),
      call_site_(std::move(call_site)) {}

CheckpointNode::~CheckpointNode() { release_python(); }

void CheckpointNode::release_python() {
  if (!function_) return;
  if (Py_IsInitialized()) {
    const py::gil_scoped_acquire gil;
    py::object(std::move(function_));
    call_site_ = {};
    input_types_.clear();
  } else {
    function_.release();
    call_site_.code.release();
    for (auto& type : input_types_) type.release();
  }
}

void CheckpointNode::release_variables() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    released_ = true;
    inputs_.clear();
    parameters_.clear();
    surroundings_.rng.reset();
  }
  release_python();
}

CheckpointNode::Saved CheckpointNode::unpack() {
  // Taken without the GIL, which an unpack hook may need.
  const std::lock_guard<std::mutex> lock(mutex_);
  TORCH_CHECK(!released_, torch::autograd::ERR_BACKWARD_TWICE);
  Saved saved;
  saved.surroundings = surroundings_;
  saved.parameters = parameters_;
  saved.inputs.reserve(inputs_.size());
  for (size_t i = 0; i < inputs_.size(); ++i) {
    try {
      saved.inputs.push_back(inputs_[i].unpack());
    } catch (c10::Error& error) {
      error.add_context("while CheckpointFunction read input " + std::to_string(i) +
                        " for its recompute");
      throw;
    }
  }
  return saved;
}

CheckpointNode::Recomputed CheckpointNode::recompute(const Saved& saved,
                                                     const variable_list& grads) {
  variable_list arguments;
  arguments.reserve(saved.inputs.size());
  for (const auto& input : saved.inputs) {
    arguments.push_back(input.detach());
    if (input.requires_grad()) arguments.back().set_requires_grad(true);
  }

  const py::gil_scoped_acquire gil;
  std::vector<py::object> owners;  // which keep the types of `arguments`
  for (size_t i = 0; i < input_types_.size(); ++i) {
    if (!input_types_[i]) continue;
    owners.push_back(wrap_as(arguments[i], input_types_[i]));
    arguments[i] = THPVariable_Unpack(owners.back().ptr());
  }
  const RegionMark mark;
  Recomputed graph;
  find_roots(call_again(saved, arguments), grads, graph);
  find_targets(mark, arguments, saved, graph);
  return graph;
}

FunctionResult CheckpointNode::call_again(const Saved& saved, const variable_list& arguments) {
  const py::object function = function_;
  TORCH_CHECK(function, torch::autograd::ERR_BACKWARD_TWICE);
  std::optional<FunctionResult> result;
  std::vector<Read> reads;
  {
    const ReadObserver observer(outside_.find_changed({function.ptr()}), &pending_);
    const RecomputeGuard guard(saved.surroundings);
    const ForwardRecordScope scope(forward_record_, ForwardRecordScope::kReplaying);
    result = FunctionResult::of_call(function, arguments);
    reads = observer.reads();
  }
  if (!reads.empty()) throw_error("function_outside_changed", as_list(reads));
  return *std::move(result);
}

void CheckpointNode::find_roots(const FunctionResult& result, const variable_list& grads,
                                Recomputed& graph) const {
  if (result.size() != output_numbers_.size()) {
    throw_error("other_number_of_outputs", result.size(), output_numbers_.size());
  }
  for (size_t i = 0; i < output_numbers_.size(); ++i) {
    if (output_numbers_[i] == kNotDifferentiable) continue;
    const auto& grad = grads[output_numbers_[i]];
    if (!grad.defined()) continue;
    if (!THPVariable_Check(result[i])) throw_error("output_is_no_tensor", i);
    const at::Tensor& output = THPVariable_Unpack(result[i]);
    if (output.sym_sizes() != grad.sym_sizes()) {
      throw_error("output_of_other_shape", i, py::handle(result[i]), grad);
    }
    if (!output.requires_grad()) continue;
    graph.roots.push_back(gradient_edge(output));
    graph.root_grads.push_back(grad);
  }
}

void CheckpointNode::find_targets(const RegionMark& mark, const variable_list& arguments,
                                  const Saved& saved, Recomputed& graph) {
  // Every listed tensor that needs a gradient marks the boundary, also where this backward does not
  // ask for it.
  edge_list listed(num_outputs());
  edge_list sinks(num_outputs());
  for (size_t i = 0; i < num_outputs(); ++i) {
    const bool is_input = i < arguments.size();
    const at::Tensor& tensor =
        is_input ? arguments[i] : saved.parameters[i - arguments.size()].tensor;
    if (!tensor.requires_grad()) continue;
    listed[i] = gradient_edge(tensor);
    // The engine would run the hooks of a parameter, and, of one that was computed, on through the
    // graph that computed it.
    if (!is_input && (has_tensor_hooks(listed[i]) || !tensor.is_leaf())) {
      sinks[i] = make_sink(tensor);
    }
  }
  warn_unlisted(close_region(mark, graph.roots, listed, sinks), call_site_);

  graph.targets.resize(num_outputs());
  for (size_t i = 0; i < num_outputs(); ++i) {
    // A repeated parameter has no next edge.
    if (!task_should_compute_output(i)) continue;
    graph.targets[i] = sinks[i].is_valid() ? sinks[i] : listed[i];
  }
}

variable_list CheckpointNode::apply(variable_list&& grads) {
  const Saved saved = unpack();
  for (size_t i = 0; i < saved.parameters.size(); ++i) {
    const auto& [tensor, version] = saved.parameters[i];
    if (tensor._version() != version) throw_error("parameter_changed", i, tensor, version);
  }
  variable_list results(num_outputs());
  const bool any_grad = std::any_of(grads.begin(), grads.end(),
                                    [](const at::Tensor& grad) { return grad.defined(); });
  if (!any_grad) return results;

  Recomputed graph = recompute(saved, grads);
  edge_list roots;
  variable_list root_grads;
  for (size_t i = 0; i < graph.roots.size(); ++i) {
    if (!graph.roots[i].is_valid()) continue;  // cut: it leads out of the region
    roots.push_back(std::move(graph.roots[i]));
    root_grads.push_back(std::move(graph.root_grads[i]));
  }
  edge_list targets;
  for (const auto& target : graph.targets) {
    if (target.is_valid()) targets.push_back(target);
  }
  // With no target the engine would accumulate into every leaf.
  if (roots.empty() || targets.empty()) return results;

  auto captured = torch::autograd::Engine::get_default_engine().execute(
      roots, root_grads, /*keep_graph=*/false, /*create_graph=*/false, /*accumulate_grad=*/false,
      targets);
  size_t next = 0;
  for (size_t i = 0; i < results.size(); ++i) {
    if (graph.targets[i].is_valid()) results[i] = std::move(captured[next++]);
  }
  if (at::GradMode::is_enabled()) forbid_double_backward(results, grads);
  return results;
}

void CheckpointNode::forbid_double_backward(variable_list& results,
                                            const variable_list& grads) const {
  edge_list edges = next_edges();
  for (const auto& grad : grads) {
    if (grad.defined() && grad.requires_grad()) edges.push_back(impl::gradient_edge(grad));
  }
  std::string message = [] {
    const py::gil_scoped_acquire gil;
    return registered_errors().attr("DOUBLE_BACKWARD").cast<std::string>();
  }();
  NodePtr error = make_node<torch::autograd::Error>(std::move(message), std::move(edges));
  for (auto& result : results) {
    if (!result.defined()) continue;
    result = result.detach();
    impl::set_gradient_edge(result, {error, error->add_input_metadata(result)});
  }
}

}  // namespace memsave_ext
