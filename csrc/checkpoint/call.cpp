#include "checkpoint/call.h"

#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>

namespace memsave_ext {

namespace py = pybind11;

void throw_python_error() {
  python_error error;
  error.persist();
  throw std::move(error);
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
  if (result == nullptr) throw_python_error();
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

}  // namespace memsave_ext
