#pragma once

#include <torch/library.h>

namespace memsave_ext::adam {

void register_operators(torch::Library& library);

}  // namespace memsave_ext::adam
