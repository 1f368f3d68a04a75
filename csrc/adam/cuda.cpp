#include "adam/cuda.h"

#include <c10/cuda/CUDAStream.h>

#include "adam/ops.h"

namespace memsave_ext::adam {

void* current_cuda_stream(c10::Device device) {
  return c10::cuda::getCurrentCUDAStream(device.index()).stream();
}

}  // namespace memsave_ext::adam

TORCH_LIBRARY_IMPL(memsave_ext, CUDA, library) { memsave_ext::adam::register_operators(library); }
