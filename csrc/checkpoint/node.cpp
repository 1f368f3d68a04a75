#include "checkpoint/node.h"

#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/functions/basic_ops.h>
#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>

#include "checkpoint/boundary.h"
#include "checkpoint/call.h"
#include "checkpoint/mismatch.h"

namespace memsave_ext {

namespace py = pybind11;
using torch::autograd::Edge;
using torch::autograd::edge_list;
using torch::autograd::variable_list;
namespace impl = torch::autograd::impl;

// What one backward works with.
struct CheckpointNode::Saved {
  variable_list inputs;
  variable_list parameters;
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
                               Surroundings surroundings, Tape tape, CallSite* call_site,
                               edge_list next_edges)
    : Node(std::move(next_edges)),
      function_(std::move(function)),
      inputs_(std::move(inputs)),
      input_types_(std::move(input_types)),
      parameters_(std::move(parameters)),
      outside_(std::move(outside)),
      surroundings_(std::move(surroundings)),
      tape_(std::move(tape)),
      call_site_(call_site) {}

CheckpointNode::~CheckpointNode() { release_python(); }

void CheckpointNode::release_python() {
  if (!function_) return;
  if (Py_IsInitialized()) {
    const py::gil_scoped_acquire gil;
    py::object(std::move(function_));
    input_types_.clear();
  } else {
    function_.release();
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
  saved.parameters.reserve(parameters_.size());
  for (size_t i = 0; i < parameters_.size(); ++i) {
    const auto& [tensor, version] = parameters_[i];
    TORCH_CHECK(tensor._version() == version, "CheckpointFunction: parameter ", i, " (shape ",
                tensor.sym_sizes(), ", dtype ", c10::getDtypeNames(tensor.scalar_type()).first,
                ") has been modified by an inplace operation: it is at version ", tensor._version(),
                ", the forward used version ", version,
                ". A recompute would differentiate another function; change parameters after "
                "backward.");
    saved.parameters.push_back(tensor);
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
  const py::object function = function_;
  TORCH_CHECK(function, torch::autograd::ERR_BACKWARD_TWICE);
  std::vector<py::object> owners;  // which keep the types of `arguments`
  for (size_t i = 0; i < input_types_.size(); ++i) {
    if (!input_types_[i]) continue;
    owners.push_back(wrap_as(arguments[i], input_types_[i]));
    arguments[i] = THPVariable_Unpack(owners.back().ptr());
  }
  const RegionMark mark;
  std::optional<FunctionResult> result;
  std::string reads;
  {
    std::optional<ReadObserver> observer;
    auto changed = outside_.find_changed({function.ptr()});
    if (!changed.empty() || pending_.any_stepped()) observer.emplace(std::move(changed), pending_);
    const RecomputeGuard guard(saved.surroundings);
    const TapeScope scope(tape_, TapeScope::kReplaying);
    result = FunctionResult::of_call(function, arguments);
    if (observer) reads = observer->reads();
  }
  if (!reads.empty()) throw_checkpoint_error(mutation_message(reads), py::none());
  TORCH_CHECK(result->size() == output_numbers_.size(),
              "CheckpointFunction: the recompute returned ", result->size(),
              " outputs, the forward ", output_numbers_.size(),
              ". The function must do the same each time it is called.");

  Recomputed graph;
  for (size_t i = 0; i < output_numbers_.size(); ++i) {
    if (output_numbers_[i] == kNotDifferentiable) continue;
    const auto& grad = grads[output_numbers_[i]];
    if (!grad.defined()) continue;
    PyObject* item = (*result)[i];
    TORCH_CHECK(
        THPVariable_Check(item), "CheckpointFunction: output ", i,
        " of the recompute is not a tensor, in the forward it was. The function must do the "
        "same each time it is called.");
    const at::Tensor& output = THPVariable_Unpack(item);
    TORCH_CHECK(output.sym_sizes() == grad.sym_sizes(), "CheckpointFunction: output ", i,
                " of the recompute has shape ", output.sym_sizes(), ", in the forward it had ",
                grad.sym_sizes(), ". The function must do the same each time it is called.");
    if (!output.requires_grad()) continue;
    graph.roots.push_back(gradient_edge(output));
    graph.root_grads.push_back(grad);
  }

  // Every listed tensor that needs a gradient marks the boundary, also where this backward does not
  // ask for it.
  edge_list listed(num_outputs());
  edge_list sinks(num_outputs());
  for (size_t i = 0; i < num_outputs(); ++i) {
    const bool is_input = i < arguments.size();
    const at::Tensor& tensor = is_input ? arguments[i] : saved.parameters[i - arguments.size()];
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
  return graph;
}

variable_list CheckpointNode::apply(variable_list&& grads) {
  const Saved saved = unpack();
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
  NodePtr error = make_node<torch::autograd::Error>(
      "CheckpointFunction does not support double backward: its gradients have no graph. Use "
      "memsave_ext.checkpoint or torch.utils.checkpoint.checkpoint(use_reentrant=False).",
      std::move(edges));
  for (auto& result : results) {
    if (!result.defined()) continue;
    result = result.detach();
    impl::set_gradient_edge(result, {error, error->add_input_metadata(result)});
  }
}

}  // namespace memsave_ext
