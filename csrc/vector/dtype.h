// The kernels' name of a tensor's type.
#pragma once

#include <c10/core/ScalarType.h>

#include <optional>

#include "vector/types.h"

namespace memsave_ext::vector {

// Nothing where no kernel computes with this type.
inline std::optional<DType> dtype_of(c10::ScalarType type) {
  switch (type) {
    case c10::ScalarType::Double:
      return DType::kDouble;
    case c10::ScalarType::Float:
      return DType::kFloat;
    case c10::ScalarType::Half:
      return DType::kHalf;
    case c10::ScalarType::BFloat16:
      return DType::kBFloat16;
    default:
      return std::nullopt;
  }
}

inline c10::ScalarType scalar_type_of(DType dtype) {
  constexpr c10::ScalarType types[] = {c10::ScalarType::Double, c10::ScalarType::Float,
                                       c10::ScalarType::Half, c10::ScalarType::BFloat16};
  static_assert(sizeof(types) / sizeof(types[0]) == kDTypes);
  return types[static_cast<int>(dtype)];
}

}  // namespace memsave_ext::vector
