// Parameters that are DTensors: kernels step this process's local tensor.
#pragma once

#include <ATen/core/Tensor.h>
#include <pybind11/pybind11.h>

#include <cstdint>
#include <vector>

namespace memsave_ext::adam {

// Those of handles need the GIL, those of tensors take it.

bool is_dtensor(const pybind11::handle& tensor);

// Returns a DTensor's local tensor; any other tensor itself.
at::Tensor local_tensor(const pybind11::handle& tensor);

// Returns this process's part of a parameter's gradient, redistributed to the parameter's
// placement; undefined where there is no gradient.
at::Tensor local_gradient(const pybind11::handle& param);

// Returns a DTensor with the parameter's placement and `local` as its local tensor; `local` itself
// where the parameter is no DTensor.
pybind11::object as_placed(const pybind11::handle& param, const at::Tensor& local);

// Returns the scales of all processes' blocks, as a DTensor, of which `local` are this process's;
// `local` itself where the parameter is no DTensor.
pybind11::object scale_as_placed(const pybind11::handle& param, const at::Tensor& local);

// Returns how many elements the largest shard of a DTensor has, the same number in every process.
int64_t largest_shard(const at::Tensor& param);

// Returns the shape of this process's scales of a DTensor, for blocks of so many elements.
std::vector<int64_t> local_scale_shape(const at::Tensor& param, int64_t block);

// Gives a gradient memory of its own where its local part is a part of more, and returns that part.
at::Tensor leave_buffer(const at::Tensor& grad, const at::Tensor& local);

// The processes over which a DTensor is split. Those of two are the same where `number` is.
struct Sharding {
  int64_t number = 0;  // 0: the whole parameter is in each process
  int64_t shards = 1;
};

Sharding sharding_of(const at::Tensor& param);

// Returns the sums of these values over the processes of a DTensor's shards: a collective.
at::Tensor sum_over_shards(const at::Tensor& param, const at::Tensor& values);

}  // namespace memsave_ext::adam
