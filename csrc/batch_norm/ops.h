// The batch_norm operators of the dispatcher for one device: they check the arguments, allocate and
// call the device's kernels. memsave_ext/batch_norm/operators.py has the schemas and their meaning.
#pragma once

#include <torch/library.h>

namespace memsave_ext::batch_norm {

void register_operators(torch::Library& library);

}  // namespace memsave_ext::batch_norm
