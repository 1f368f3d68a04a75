#include "checkpoint/tensors.h"

#include <c10/util/hash.h>

namespace memsave_ext::checkpoint {

namespace py = pybind11;

WeakStorage weak_storage(const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.has_storage()) {
    return WeakStorage(c10::intrusive_ptr<c10::StorageImpl>());
  }
  return tensor.storage().getWeakStorageImpl();
}

Metadata Metadata::of(const at::Tensor& tensor) {
  c10::SmallVector<int64_t, 4> sizes;
  if (!tensor.is_nested()) sizes = c10::SmallVector<int64_t, 4>(tensor.sizes());
  return {std::move(sizes), tensor.scalar_type(), tensor.device()};
}

bool Metadata::fits(const at::Tensor& tensor) const {
  return dtype == tensor.scalar_type() && device == tensor.device() &&
         (tensor.is_nested() || tensor.sizes().equals(sizes));
}

py::tuple Metadata::as_tuple() const {
  return py::make_tuple(std::vector<int64_t>(sizes.begin(), sizes.end()), dtype, device);
}

ByteRange ByteRange::of(const at::Tensor& tensor) {
  return of(tensor.sizes(), tensor.strides(), tensor.storage_offset(), tensor.itemsize());
}

ByteRange ByteRange::of(at::IntArrayRef sizes, at::IntArrayRef strides, int64_t offset,
                        size_t itemsize) {
  const int64_t size = static_cast<int64_t>(itemsize);
  const int64_t begin = offset * size;
  int64_t last = 0;
  for (size_t i = 0; i < sizes.size(); ++i) {
    if (sizes[i] == 0) return {begin, begin};
    last += (sizes[i] - 1) * strides[i];
  }
  return {begin, begin + (last + 1) * size};
}

size_t layout_of(const at::Tensor& tensor) {
  if (tensor.is_nested()) return 0;  // which has no sizes in one piece
  return c10::get_hash(tensor.scalar_type(), tensor.is_conj(), tensor.is_neg(),
                       tensor.storage_offset(), tensor.sizes(), tensor.strides());
}

}  // namespace memsave_ext::checkpoint
