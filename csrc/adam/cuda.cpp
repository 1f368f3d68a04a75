#include "adam/ops.h"

TORCH_LIBRARY_IMPL(memsave_ext, CUDA, library) { memsave_ext::adam::register_operators(library); }
