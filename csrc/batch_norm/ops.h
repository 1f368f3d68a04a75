// The dispatcher's batch_norm operators for one device: check, allocate, call its kernels.
// Schemas and their meaning: memsave_ext/_ops.py.
#pragma once

#include <torch/library.h>

namespace memsave_ext::batch_norm {

void register_operators(torch::Library& library);

}  // namespace memsave_ext::batch_norm
