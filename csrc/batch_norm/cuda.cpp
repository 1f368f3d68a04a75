#include "batch_norm/ops.h"

TORCH_LIBRARY_IMPL(memsave_ext, CUDA, library) {
  memsave_ext::batch_norm::register_operators(library);
}
