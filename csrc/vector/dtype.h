// The kernels' name of a tensor's type.
#pragma once

#include <c10/core/ScalarType.h>

#include <optional>

#include "vector/types.h"

namespace memsave_ext::vector {

// Nothing where no kernel computes with such values.
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

}  // namespace memsave_ext::vector
