// Tensors as Python has them, and the parts of DTensors in this process.
#pragma once

#include <ATen/core/Tensor.h>
#include <pybind11/pybind11.h>
#include <torch/csrc/autograd/python_variable.h>

namespace memsave_ext::adam {

// Those of handles need the GIL, those of tensors take it.

bool is_dtensor(const pybind11::handle& tensor);

// Returns a DTensor's local tensor; any other tensor itself.
at::Tensor local_tensor(const pybind11::handle& tensor);

// Returns this process's part of a DTensor's gradient, redistributed to the parameter's placement;
// undefined where there is no gradient.
at::Tensor local_gradient(const pybind11::handle& param);

// Gives a gradient memory of its own where its local part is a part of more, and returns that part.
at::Tensor leave_buffer(const at::Tensor& grad, const at::Tensor& local);

// The Python object of a tensor; None where it is undefined. Needs the GIL.
inline pybind11::object wrapped(const at::Tensor& tensor) {
  return pybind11::reinterpret_steal<pybind11::object>(THPVariable_Wrap(tensor));
}

}  // namespace memsave_ext::adam
