#include "checkpoint/apply.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/ones.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <optional>

#include "checkpoint/boundary.h"
#include "checkpoint/call.h"
#include "checkpoint/errors.h"
#include "checkpoint/node.h"

namespace memsave_ext {

namespace py = pybind11;
using torch::autograd::edge_list;
using torch::autograd::SavedVariable;
using torch::autograd::variable_list;
namespace impl = torch::autograd::impl;

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
  py::tuple given(nargs);
  for (Py_ssize_t i = 0; i < nargs; ++i) given[i] = py::reinterpret_borrow<py::object>(args[i]);
  call_errors("check_arguments", *given);
  TORCH_INTERNAL_ASSERT(false, "check_arguments takes what CheckpointFunction.apply does not");
}

void check_not_transformed() {
  if (c10::impl::tls_is_dispatch_key_included(c10::DispatchKey::FuncTorchDynamicLayerFrontMode)) {
    throw_error("inside_transform");
  }
}

bool holds_tensor(PyObject* object) {
  if (PyDict_Check(object)) {
    PyObject *key, *value;
    Py_ssize_t position = 0;
    while (PyDict_Next(object, &position, &key, &value)) {
      if (THPVariable_Check(value) || holds_tensor(value)) return true;
    }
    return false;
  }
  if (!PyTuple_Check(object) && !PyList_Check(object)) return false;
  for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(object); ++i) {
    PyObject* item = PySequence_Fast_GET_ITEM(object, i);
    if (THPVariable_Check(item) || holds_tensor(item)) return true;
  }
  return false;
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
  edge_list roots;
  std::vector<py::object> elements;
  for (size_t i = 0; i < result.size(); ++i) {
    elements.push_back(py::reinterpret_borrow<py::object>(result[i]));
    if (!THPVariable_Check(result[i])) continue;
    const at::Tensor& output = THPVariable_Unpack(result[i]);
    if (!output.requires_grad()) continue;
    roots.push_back(gradient_edge(output));
    elements.back() = wrap_as(detached(output), subclass_of(output));
  }
  if (!roots.empty()) warn_unlisted(close_region(mark, roots, {}, {}), CallSite::current());
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
  const auto rng = std::make_shared<RngState>();

  const std::vector<PyObject*> roots{arguments.function.ptr()};
  OutsideTensors outside;
  outside.note(roots);

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
  outside.leave_out_own_changes(roots);
  rng->forget_unused_capture();
  auto node = make_node<CheckpointNode>(
      arguments.function, std::move(saved), std::move(types), std::move(parameters),
      std::move(outside), Surroundings{settings, autocast, rng, current_cuda_stream()},
      std::move(record), CallSite::current(), std::move(edges));
  return connect_outputs(result, arguments.inputs, node.get(), node);
}

}  // namespace

PyObject* checkpoint_apply(PyObject*, PyObject* const* args, Py_ssize_t nargs) {
  HANDLE_TH_ERRORS
  const std::optional<Arguments> arguments = parse(args, nargs);
  if (!arguments) refuse(args, nargs);
  check_not_transformed();
  return apply(*arguments).release().ptr();
  END_HANDLE_TH_ERRORS
}

}  // namespace memsave_ext
