// Calls of Python: of the user's function, and reading what it returns: one tensor, or a tuple or
// list whose elements may be tensors or anything else; and of the functions that make errors.
#pragma once

#include <pybind11/pybind11.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/csrc/autograd/variable.h>

#include <utility>
#include <vector>

#include "errors.h"

namespace memsave_ext::checkpoint {

class FunctionResult {
 public:
  // Calls `function(*tensors)`; throws the function's own exception.
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

// Autograd's accessors lock the tensor's mutex, which another thread's operator may hold while it
// waits for the GIL. These release it meanwhile.
at::Tensor detached(const at::Tensor& tensor);  // with the GIL or without
torch::autograd::Edge gradient_edge(
    const at::Tensor& tensor);  // invalid where it requires no gradient
torch::autograd::SavedVariable save_input(const at::Tensor& tensor);

// The Python type of a tensor of a subclass; null for torch.Tensor and Parameter.
pybind11::object subclass_of(const at::Tensor& tensor);
// Wraps an alias that was made in C++ as an object of the subclass `type`; null: torch.Tensor.
pybind11::object wrap_as(const at::Tensor& alias, const pybind11::object& type);

// What is wrong is found here; the words for it are in memsave_ext/checkpoint/errors.py, which the
// fallback shares. Calls the function `name` there with the facts. Needs the GIL.
template <typename... Facts>
pybind11::object call_errors(const char* name, Facts&&... facts) {
  return registered("checkpoint_errors").attr(name)(std::forward<Facts>(facts)...);
}

// Throws the exception that this function makes of the facts. Takes the GIL.
template <typename... Facts>
[[noreturn]] void throw_error(const char* name, Facts&&... facts) {
  const pybind11::gil_scoped_acquire gil;
  throw_exception(call_errors(name, std::forward<Facts>(facts)...));
}

}  // namespace memsave_ext::checkpoint
