// Calling the user's function and reading what it returns: one tensor, or a tuple or list whose
// elements may be tensors or anything else.
#pragma once

#include <pybind11/pybind11.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/csrc/autograd/variable.h>

#include <vector>

namespace memsave_ext {

class FunctionResult {
 public:
  // Calls `function(*tensors)`; throws python_error with the function's own exception.
  static FunctionResult of_call(const pybind11::object& function,
                                const torch::autograd::variable_list& tensors);

  size_t size() const { return is_sequence_ ? PySequence_Fast_GET_SIZE(object_.ptr()) : 1; }
  PyObject* operator[](size_t i) const {  // borrowed
    return is_sequence_ ? PySequence_Fast_GET_ITEM(object_.ptr(), i) : object_.ptr();
  }
  const pybind11::object& object() const { return object_; }
  // The same kind of tuple or list, with these elements.
  pybind11::object rebuild(std::vector<pybind11::object> elements) const;

 private:
  explicit FunctionResult(pybind11::object object);

  pybind11::object object_;
  bool is_sequence_;
};

// These need the GIL and release it meanwhile: autograd's accessors lock the tensor's mutex, which
// another thread's operator may hold while it waits for the GIL.
at::Tensor detached(const at::Tensor& tensor);
torch::autograd::Edge gradient_edge(
    const at::Tensor& tensor);  // invalid where it requires no gradient
torch::autograd::SavedVariable save_input(const at::Tensor& tensor);

// The Python type of a tensor of a subclass; null for torch.Tensor and Parameter.
pybind11::object subclass_of(const at::Tensor& tensor);
// Wraps an alias that was made in C++ as an object of the subclass `type`; null: torch.Tensor.
pybind11::object wrap_as(const at::Tensor& alias, const pybind11::object& type);

// Throws the Python exception that is set, in a form that survives a change of thread.
[[noreturn]] void throw_python_error();

}  // namespace memsave_ext
