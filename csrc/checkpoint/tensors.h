// What is kept of a tensor that is not kept itself: its storage, version, shape and place.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Storage.h>
#include <c10/util/SmallVector.h>
#include <pybind11/pybind11.h>

#include <cstdint>

namespace memsave_ext::checkpoint {

using WeakStorage = c10::weak_intrusive_ptr<c10::StorageImpl>;

// Its address is not given to another storage while this lives, but its memory may be freed. Null
// where the tensor has no storage.
WeakStorage weak_storage(const at::Tensor& tensor);
// 0 of inference tensors, which have none.
inline uint32_t version_of(const at::Tensor& tensor) {
  const c10::VariableVersion& version = tensor.unsafeGetTensorImpl()->version_counter();
  return version.enabled() ? version.current_version() : 0;
}

struct Metadata {
  c10::SmallVector<int64_t, 4> sizes;  // empty for a nested tensor, which has none in one piece
  c10::ScalarType dtype;
  c10::Device device;

  static Metadata of(const at::Tensor& tensor);
  bool fits(const at::Tensor& tensor) const;
  // As memsave_ext/checkpoint/errors.py takes it. Needs the GIL.
  pybind11::tuple as_tuple() const;
};

// The bytes of a storage that a tensor's elements lie in.
struct ByteRange {
  int64_t begin, end;

  static ByteRange of(const at::Tensor& tensor);
  static ByteRange of(at::IntArrayRef sizes, at::IntArrayRef strides, int64_t offset,
                      size_t itemsize);
  bool overlaps(const ByteRange& other) const { return begin < other.end && other.begin < end; }
};

// A hash of how a tensor's elements lie in its storage: views of one storage that differ in it have
// other values. Of a tensor with strides.
size_t layout_of(const at::Tensor& tensor);

}  // namespace memsave_ext::checkpoint
