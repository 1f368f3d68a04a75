// What a region of memsave_ext.checkpoint keeps of its arguments and of what its graph saves.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Storage.h>
#include <c10/util/SmallVector.h>
#include <pybind11/pybind11.h>
#include <torch/csrc/autograd/saved_variable.h>

#include <cstdint>
#include <optional>
#include <utility>

namespace memsave_ext {

using WeakStorage = c10::weak_intrusive_ptr<c10::StorageImpl>;

// Its address is not given to another storage while this lives, but its memory may be freed. Null
// where the tensor has no storage.
WeakStorage weak_storage(const at::Tensor& tensor);
uint32_t version_of(const at::Tensor& tensor);  // 0 of inference tensors, which have none

struct Metadata {
  c10::SmallVector<int64_t, 4> sizes;  // empty for a nested tensor, which has none in one piece
  c10::ScalarType dtype;
  c10::Device device;

  static Metadata of(const at::Tensor& tensor);
  bool fits(const at::Tensor& tensor) const;
  // As memsave_ext/checkpoint/errors.py takes it. Needs the GIL.
  pybind11::tuple as_tuple() const;
};

// What the forward saved at one position.
struct Slot {
  uint32_t holders;  // 0 once autograd has dropped it
  Metadata metadata;
  WeakStorage storage;
  uint32_t version;

  static Slot of(const at::Tensor& tensor);
  // A recompute that saves the same storage saves a tensor from outside, which must not have
  // changed in between.
  bool is_storage_of(const at::Tensor& tensor) const;
};

// A positional argument: tensors are kept as autograd keeps them, so that hooks of enclosing
// regions and of save_on_cpu see them, and a change in place is noticed. Autograd does not look at
// versions where there are hooks; they may hand the tensor itself on.
struct RegionArgument {
  torch::autograd::SavedVariable tensor;
  WeakStorage storage;
  uint32_t version;
  pybind11::object other;  // set when the argument is not a tensor

  static RegionArgument of(PyObject* argument);
  at::Tensor unpack() const;  // releases the GIL meanwhile
  // The versions in the forward and now, where it was changed in place; `now` is what unpack()
  // gave.
  std::optional<std::pair<uint32_t, uint32_t>> change(const at::Tensor& now) const;
};

}  // namespace memsave_ext
