// For code that changes the user's memory during backward: an optimizer that steps in backward.
#pragma once

#include <ATen/core/Tensor.h>

namespace memsave_ext::remat {

// Whether dropped values that backward still needs are computed from this tensor's memory. Only
// memory that was made outside of a block counts.
bool is_needed(const at::Tensor& tensor);

}  // namespace memsave_ext::remat
