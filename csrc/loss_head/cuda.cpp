#include "loss_head/ops.h"

TORCH_LIBRARY_IMPL(memsave_ext, CUDA, library) {
  memsave_ext::loss_head::register_operators(library);
}
