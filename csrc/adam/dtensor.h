// Parameters that are DTensors: kernels step this process's part of them.
#pragma once

#include <ATen/core/Tensor.h>
#include <pybind11/pybind11.h>

namespace memsave_ext::adam {

// All need the GIL.

bool is_dtensor(const pybind11::handle& tensor);

// The part of a DTensor that is here; another tensor itself.
at::Tensor local_tensor(const pybind11::handle& tensor);

// The part of a parameter's gradient that is here, placed as the parameter is; undefined where
// there is no gradient.
at::Tensor local_gradient(const pybind11::handle& param);

// The DTensor placed as the parameter is, of which `local` is the part that is here; `local` itself
// where the parameter is none.
pybind11::object as_placed(const pybind11::handle& param, const at::Tensor& local);

}  // namespace memsave_ext::adam
