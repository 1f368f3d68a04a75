#include "checkpoint/call.h"

#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/python_variable.h>

#include <optional>

namespace memsave_ext::checkpoint {

namespace py = pybind11;

at::Tensor detached(const at::Tensor& tensor) {
  std::optional<py::gil_scoped_release> no_gil;
  if (PyGILState_Check()) no_gil.emplace();
  return tensor.detach();
}

torch::autograd::Edge gradient_edge(const at::Tensor& tensor) {
  if (!tensor.requires_grad()) return {};
  const py::gil_scoped_release no_gil;
  return torch::autograd::impl::gradient_edge(tensor);
}

torch::autograd::SavedVariable save_input(const at::Tensor& tensor) {
  const py::gil_scoped_release no_gil;
  return torch::autograd::SavedVariable(tensor, /*is_output=*/false);
}

py::object subclass_of(const at::Tensor& tensor) {
  const auto object = py::reinterpret_steal<py::object>(THPVariable_Wrap(tensor));
  if (THPVariable_CheckExact(object.ptr())) return {};
  static PyObject* const parameter =
      py::object(py::module_::import("torch.nn").attr("Parameter")).release().ptr();
  const py::object type = py::type::of(object);
  return PyObject_IsSubclass(type.ptr(), parameter) == 1 ? py::object() : type;
}

py::object wrap_as(const at::Tensor& alias, const py::object& type) {
  auto object = py::reinterpret_steal<py::object>(THPVariable_Wrap(alias));
  if (!type || py::type::of(object).is(type)) return object;
  const at::NoGradGuard no_grad;
  py::object converted = object.attr("as_subclass")(type);
  if (alias.requires_grad()) THPVariable_Unpack(converted.ptr()).set_requires_grad(true);
  return converted;
}

FunctionResult::FunctionResult(py::object object)
    : object_(std::move(object)),
      is_sequence_(PyTuple_Check(object_.ptr()) || PyList_Check(object_.ptr())) {}

FunctionResult FunctionResult::of_call(const py::object& function,
                                       const torch::autograd::variable_list& tensors) {
  std::vector<py::object> owners;
  std::vector<PyObject*> arguments{nullptr};  // room for a bound method's self
  owners.reserve(tensors.size());
  arguments.reserve(tensors.size() + 1);
  for (const auto& tensor : tensors) {
    owners.push_back(py::reinterpret_steal<py::object>(THPVariable_Wrap(tensor)));
    arguments.push_back(owners.back().ptr());
  }
  PyObject* result = PyObject_Vectorcall(function.ptr(), arguments.data() + 1,
                                         tensors.size() | PY_VECTORCALL_ARGUMENTS_OFFSET, nullptr);
  if (result == nullptr) throw py::error_already_set();
  return FunctionResult(py::reinterpret_steal<py::object>(result));
}

py::object FunctionResult::rebuild(std::vector<py::object> elements) const {
  if (!is_sequence_) return std::move(elements[0]);
  const bool list = PyList_Check(object_.ptr());
  auto sequence = py::reinterpret_steal<py::object>(list ? PyList_New(elements.size())
                                                         : PyTuple_New(elements.size()));
  for (size_t i = 0; i < elements.size(); ++i) {
    PyObject* element = elements[i].release().ptr();
    if (list) {
      PyList_SET_ITEM(sequence.ptr(), i, element);
    } else {
      PyTuple_SET_ITEM(sequence.ptr(), i, element);
    }
  }
  if (PyTuple_CheckExact(object_.ptr()) || PyList_CheckExact(object_.ptr())) return sequence;
  const py::object type = py::type::of(object_);
  // A named tuple takes its fields one by one.
  return py::hasattr(type, "_make") ? type.attr("_make")(sequence) : type(sequence);
}

}  // namespace memsave_ext::checkpoint
