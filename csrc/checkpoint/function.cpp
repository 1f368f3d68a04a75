#include "checkpoint/function.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/ones.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/functions/basic_ops.h>
#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <optional>

#include "checkpoint/boundary.h"
#include "checkpoint/call.h"
#include "checkpoint/outside.h"

namespace memsave_ext::checkpoint {

namespace impl = torch::autograd::impl;
namespace py = pybind11;
using torch::autograd::Edge;
using torch::autograd::edge_list;
using torch::autograd::SavedVariable;
using torch::autograd::variable_list;

namespace {

struct Arguments {
  py::object function;
  variable_list inputs;
  variable_list parameters;
};

// Nothing where an argument has a wrong type or value.
std::optional<Arguments> parse(PyObject* const* args, Py_ssize_t nargs) {
  if (nargs < 2 || !PyCallable_Check(args[0]) || !PyLong_Check(args[1]) || PyBool_Check(args[1])) {
    return std::nullopt;
  }
  const Py_ssize_t count = nargs - 2;
  const Py_ssize_t n = PyLong_AsSsize_t(args[1]);
  PyErr_Clear();  // a number that is too large, which is -1 then
  if (n < 0 || n > count) return std::nullopt;
  Arguments parsed{py::reinterpret_borrow<py::object>(args[0]), {}, {}};
  parsed.inputs.reserve(n);
  parsed.parameters.reserve(count - n);
  for (Py_ssize_t i = 0; i < count; ++i) {
    PyObject* arg = args[i + 2];
    if (!THPVariable_Check(arg)) return std::nullopt;
    (i < n ? parsed.inputs : parsed.parameters).push_back(THPVariable_Unpack(arg));
  }
  return parsed;
}

// Throws the error that the checks in Python make of wrong arguments.
[[noreturn]] void refuse(PyObject* const* args, Py_ssize_t nargs) {
  py::tuple all(nargs);
  for (Py_ssize_t i = 0; i < nargs; ++i) all[i] = py::reinterpret_borrow<py::object>(args[i]);
  call_errors("check_arguments", *all);
  TORCH_INTERNAL_ASSERT(false, "check_arguments takes what CheckpointFunction.apply does not");
}

void check_not_transformed() {
  if (c10::impl::tls_is_dispatch_key_included(c10::DispatchKey::FuncTorchDynamicLayerFrontMode)) {
    throw_error("inside_transform");
  }
}

// Of containers: a tensor itself holds none.
bool holds_tensor(PyObject* output) {
  if (THPVariable_Check(output)) return false;
  bool holds = false;
  for_each_tensor(output, [&](PyObject*) { holds = true; });
  return holds;
}

void check_outputs(const FunctionResult& result) {
  for (size_t i = 0; i < result.size(); ++i) {
    if (holds_tensor(result[i])) throw_error("output_holds_tensors", i, py::handle(result[i]));
  }
}

Py_ssize_t references_to_base(const at::Tensor& view) {
  const at::TensorBase& base = view._base();
  const auto object = py::reinterpret_steal<py::object>(THPVariable_Wrap(at::Tensor(base)));
  return Py_REFCNT(object.ptr()) + static_cast<Py_ssize_t>(base.use_count());
}

// Whether anybody but this view keeps what it is a view of. A base that nobody keeps tells how many
// references are torch's own, which differs between its versions.
bool shares_base(const at::Tensor& view) {
  static const Py_ssize_t of_nobody = [] {
    const at::Tensor orphan = at::ones({2}).narrow(0, 0, 1);
    return references_to_base(orphan);
  }();
  return references_to_base(view) > of_nobody;
}

bool is_returned_twice(const FunctionResult& result, size_t index) {
  for (size_t i = 0; i < result.size(); ++i) {
    if (i != index && result[i] == result[index]) return true;
  }
  return false;
}

// A tangent of an output without its graph would have derivatives that miss the function.
void refuse_tangent(const at::Tensor& output) {
  if (output._fw_grad(/*level=*/0).defined()) throw_error("forward_mode");
}

// What the region returns in place of an output, which may be others': an input handed through, a
// tensor from a closure, a view. Where a change in place would have to enter a history that the
// region does not see, torch refuses it, as it does for such outputs of custom Functions.
at::Tensor alias_of(const at::Tensor& output, bool has_other_history) {
  if (!has_other_history || output.is_inference()) return detached(output);
  const py::gil_scoped_release no_gil;
  const at::NoGradGuard no_grad;
  const at::AutoFwGradMode no_forward_grad(false);
  return output.view_as(output);
}

// Connects the outputs to the node.
py::object connect_outputs(const FunctionResult& result, const variable_list& inputs,
                           CheckpointNode* node, const NodePtr& owner) {
  OutputNumbers numbers;
  std::vector<py::object> elements;
  for (size_t i = 0; i < result.size(); ++i) {
    elements.push_back(py::reinterpret_borrow<py::object>(result[i]));
    numbers.push_back(kNotDifferentiable);
    if (!THPVariable_Check(result[i])) continue;
    at::Tensor output = THPVariable_Unpack(result[i]);
    if (!c10::isFloatingType(output.scalar_type()) && !c10::isComplexType(output.scalar_type())) {
      continue;
    }
    refuse_tangent(output);
    const bool is_input = std::any_of(inputs.begin(), inputs.end(), [&](const at::Tensor& input) {
      return input.is_same(output);
    });
    const bool has_other_history = is_input || output.requires_grad() ||
                                   is_returned_twice(result, i) ||
                                   (output.is_view() && shares_base(output));
    const py::object type = subclass_of(output);
    elements.back() = wrap_as(alias_of(output, has_other_history), type);
    output = THPVariable_Unpack(elements.back().ptr());
    numbers.back() = static_cast<int>(node->add_input_metadata(output));
    impl::set_gradient_edge(output, {owner, static_cast<uint32_t>(numbers.back())});
    if (has_other_history && output.is_view()) {
      impl::get_view_autograd_meta(output)->set_creation_meta(
          torch::autograd::CreationMeta::IN_CUSTOM_FUNCTION);
    }
  }
  node->set_outputs(std::move(numbers));
  return result.rebuild(std::move(elements));
}

FunctionResult call_without_graph(const Arguments& arguments, const AutocastState& autocast) {
  const at::NoGradGuard no_grad;
  const AutocastGuard uncached(autocast.without_cache());
  return FunctionResult::of_call(arguments.function, arguments.inputs);
}

// Called where no listed tensor needs a gradient. No backward will look for unlisted tensors then,
// so the forward does. The outputs need no gradient.
py::object call_and_look(const Arguments& arguments, const AutocastState& autocast) {
  const AutocastGuard uncached(autocast.without_cache());
  const RegionMark mark;
  const FunctionResult result = FunctionResult::of_call(arguments.function, arguments.inputs);
  check_outputs(result);
  edge_list roots;
  std::vector<py::object> elements;
  for (size_t i = 0; i < result.size(); ++i) {
    elements.push_back(py::reinterpret_borrow<py::object>(result[i]));
    if (!THPVariable_Check(result[i])) continue;
    const at::Tensor& output = THPVariable_Unpack(result[i]);
    if (!output.requires_grad()) continue;
    refuse_tangent(output);
    roots.push_back(gradient_edge(output));
    elements.back() = wrap_as(detached(output), subclass_of(output));
  }
  if (!roots.empty()) warn_unlisted(close_region(mark, roots, {}, {}, 0), CallSite::current());
  return result.rebuild(std::move(elements));
}

py::object apply(const Arguments& arguments) {
  const AutocastState autocast = AutocastState::capture();
  if (!at::GradMode::is_enabled()) return call_without_graph(arguments, autocast).object();
  const auto needs_grad = [](const at::Tensor& tensor) { return tensor.requires_grad(); };
  if (std::none_of(arguments.inputs.begin(), arguments.inputs.end(), needs_grad) &&
      std::none_of(arguments.parameters.begin(), arguments.parameters.end(), needs_grad)) {
    return call_and_look(arguments, autocast);
  }

  // Before the call: packed by the hooks that surround the region, at the version it starts from.
  edge_list edges;
  edges.reserve(arguments.inputs.size() + arguments.parameters.size());
  std::vector<SavedVariable> saved;
  saved.reserve(arguments.inputs.size());
  std::vector<uint32_t> versions;
  std::vector<py::object> types;
  for (const auto& input : arguments.inputs) {
    saved.push_back(save_input(input));
    types.push_back(subclass_of(input));
    versions.push_back(input._version());
    edges.push_back(gradient_edge(input));
  }
  std::vector<ListedParameter> parameters;
  parameters.reserve(arguments.parameters.size());
  for (const auto& tensor : arguments.parameters) {
    // A tensor that is listed twice gets its gradient once.
    const bool repeated =
        std::any_of(parameters.begin(), parameters.end(),
                    [&](const ListedParameter& other) { return other.tensor.is_same(tensor); });
    parameters.push_back({tensor, static_cast<uint32_t>(tensor._version())});
    edges.push_back(repeated ? torch::autograd::Edge() : gradient_edge(tensor));
  }
  const auto settings = Settings::capture();

  const std::vector<PyObject*> roots{arguments.function.ptr()};
  OutsideTensors outside;
  const auto generators = outside.note(roots);
  CudaDevices devices = outside.devices();
  for (const auto& tensor : arguments.inputs) devices.add(tensor);
  for (const auto& tensor : arguments.parameters) devices.add(tensor);
  const auto rng = std::make_shared<RngState>(devices);
  rng->add(generators);

  ForwardRecord record;
  const FunctionResult result = [&] {
    const RegionScope inside;
    const ForwardRecordScope scope(record, ForwardRecordScope::kRecording);
    return call_without_graph(arguments, autocast);
  }();
  check_outputs(result);
  for (size_t i = 0; i < versions.size(); ++i) {
    if (arguments.inputs[i]._version() != versions[i]) throw_error("input_changed", i);
  }
  outside.leave_out_changes_of_forward(roots);
  rng->forget_unused_capture();
  auto node = make_node<CheckpointNode>(
      arguments.function, std::move(saved), std::move(types), std::move(parameters),
      std::move(outside), Surroundings{settings, autocast, rng, current_cuda_stream()},
      std::move(record), CallSite::current(), std::move(edges));
  return connect_outputs(result, arguments.inputs, node.get(), node);
}

}  // namespace

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
  if (Py_IsInitialized()) {
    // Before the first look: another thread's backward through the same graph may release it, too.
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
  OwnGenerators others;
  {
    auto changed = outside_.find_changed({function.ptr()});
    others = saved.surroundings.rng->others(changed.generators);
    const ReadObserver observer(std::move(changed.tensors), &pending_);
    const RecomputeGuard guard(saved.surroundings);
    const ForwardRecordScope scope(forward_record_, ForwardRecordScope::kReplaying);
    result = FunctionResult::of_call(function, arguments);
    reads = observer.reads();
  }
  if (!reads.empty()) throw_error("function_outside_changed", as_list(reads));
  if (others.any_has_drawn()) throw_error("other_generator", py::none());
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
  warn_unlisted(close_region(mark, graph.roots, listed, sinks, arguments.size()), call_site_);

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
    return registered("checkpoint_errors").attr("DOUBLE_BACKWARD").cast<std::string>();
  }();
  NodePtr error = make_node<torch::autograd::Error>(std::move(message), std::move(edges));
  for (auto& result : results) {
    if (!result.defined()) continue;
    result = result.detach();
    impl::set_gradient_edge(result, {error, error->add_input_metadata(result)});
  }
}

PyObject* checkpoint_apply(PyObject*, PyObject* const* args, Py_ssize_t nargs) {
  HANDLE_TH_ERRORS
  const std::optional<Arguments> arguments = parse(args, nargs);
  if (!arguments) refuse(args, nargs);
  check_not_transformed();
  return apply(*arguments).release().ptr();
  END_HANDLE_TH_ERRORS
}

}  // namespace memsave_ext::checkpoint
