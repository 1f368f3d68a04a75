// Parameters that are DTensors: kernels step this process's local tensor.
#pragma once

#include <ATen/core/Tensor.h>
#include <pybind11/pybind11.h>

#include <cstdint>

namespace memsave_ext::adam {

// Those of handles need the GIL, those of tensors take it.

bool is_dtensor(const pybind11::handle& tensor);

// Returns a DTensor's local tensor; any other tensor itself.
at::Tensor local_tensor(const pybind11::handle& tensor);

// Returns this process's part of a parameter's gradient, redistributed to the parameter's
// placement; undefined where there is no gradient.
at::Tensor local_gradient(const pybind11::handle& param);

// Gives a gradient memory of its own where its local part is a part of more, and returns that part.
at::Tensor leave_buffer(const at::Tensor& grad, const at::Tensor& local);

// The processes over which a DTensor is split. Those of two are the same where `number` is.
struct Sharding {
  int64_t number = 0;  // 0: the whole parameter is in each process
  int64_t shards = 1;
};

Sharding sharding_of(const at::Tensor& param);

}  // namespace memsave_ext::adam
