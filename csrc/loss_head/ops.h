#pragma once

#include <torch/library.h>

namespace memsave_ext::loss_head {

void register_operators(torch::Library& library);

}  // namespace memsave_ext::loss_head
