// Helpers to visit the tensors among an operator's arguments and results.
#pragma once

#include <ATen/core/List.h>
#include <ATen/core/ivalue.h>

#include <optional>

#include "remat/content.h"

namespace memsave_ext::remat {

// Returns null where the tensor is not plain.
inline const c10::StorageImpl* storage_of(const at::Tensor& tensor) {
  return is_plain(tensor) ? tensor.storage().unsafeGetStorageImpl() : nullptr;
}

// Calls visit(tensor, element) for each; `element` is the position in a list, else -1.
template <typename Visit>
void for_tensors(const c10::IValue& value, const Visit& visit) {
  if (value.isTensor()) {
    visit(value.toTensor(), -1);
  } else if (value.isTensorList()) {
    const auto list = value.toTensorList();
    for (size_t i = 0; i < list.size(); ++i) visit(list.get(i), static_cast<int64_t>(i));
  } else if (value.isOptionalTensorList()) {
    const auto list = value.toOptionalTensorList();
    for (size_t i = 0; i < list.size(); ++i) {
      const std::optional<at::Tensor> tensor = list.get(i);
      if (tensor) visit(*tensor, static_cast<int64_t>(i));
    }
  }
}

inline bool holds_tensors(const c10::IValue& value) {
  return value.isTensor() || value.isTensorList() || value.isOptionalTensorList();
}

}  // namespace memsave_ext::remat
