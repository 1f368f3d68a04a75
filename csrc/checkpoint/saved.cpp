#include "checkpoint/saved.h"

#include <torch/csrc/autograd/python_variable.h>

#include "checkpoint/call.h"
#include "checkpoint/errors.h"

namespace memsave_ext {

namespace py = pybind11;

WeakStorage weak_storage(const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.has_storage()) {
    return WeakStorage(c10::intrusive_ptr<c10::StorageImpl>());
  }
  return tensor.storage().getWeakStorageImpl();
}

uint32_t version_of(const at::Tensor& tensor) {
  return tensor.is_inference() ? 0 : static_cast<uint32_t>(tensor._version());
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

Slot Slot::of(const at::Tensor& tensor) {
  return {0, Metadata::of(tensor), weak_storage(tensor), static_cast<uint32_t>(tensor._version())};
}

bool Slot::is_storage_of(const at::Tensor& tensor) const {
  return tensor.has_storage() &&
         storage._unsafe_get_target() == tensor.storage().unsafeGetStorageImpl();
}

RegionArgument RegionArgument::of(PyObject* argument) {
  if (!THPVariable_Check(argument)) {
    return {{}, weak_storage({}), 0, py::reinterpret_borrow<py::object>(argument)};
  }
  const at::Tensor& tensor = THPVariable_Unpack(argument);
  return {save_input(tensor), weak_storage(tensor), version_of(tensor), {}};
}

at::Tensor RegionArgument::unpack() const {
  const py::gil_scoped_release no_gil;
  return tensor.unpack();
}

std::optional<std::pair<uint32_t, uint32_t>> RegionArgument::change(const at::Tensor& now) const {
  const bool same = now.defined() && now.has_storage() &&
                    storage._unsafe_get_target() == now.storage().unsafeGetStorageImpl();
  if (!same || version_of(now) == version) return std::nullopt;
  return std::make_pair(version, version_of(now));
}

}  // namespace memsave_ext
