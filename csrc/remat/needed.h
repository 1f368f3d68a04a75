// For who changes memory of the user's: an optimizer that steps in backward.
#pragma once

#include <ATen/core/Tensor.h>

namespace memsave_ext::remat {

// Whether dropped values that are still awaited are computed from this memory, which is not a
// block's own.
bool is_needed(const at::Tensor& tensor);

}  // namespace memsave_ext::remat
