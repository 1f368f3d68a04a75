// Parameters that are DTensors: kernels step this process's local tensor.
#pragma once

#include <ATen/core/Tensor.h>
#include <pybind11/pybind11.h>

namespace memsave_ext::adam {

// All functions need the GIL.

bool is_dtensor(const pybind11::handle& tensor);

// Returns a DTensor's local tensor; any other tensor itself.
at::Tensor local_tensor(const pybind11::handle& tensor);

// Returns this process's part of a parameter's gradient, redistributed to the parameter's
// placement; undefined where there is no gradient.
at::Tensor local_gradient(const pybind11::handle& param);

// Returns a DTensor with the parameter's placement and `local` as its local tensor; `local` itself
// where the parameter is no DTensor.
pybind11::object as_placed(const pybind11::handle& param, const at::Tensor& local);

}  // namespace memsave_ext::adam
