#pragma once

#include <c10/core/Device.h>
#include <c10/cuda/CUDAStream.h>

namespace memsave_ext {

// A cudaStream_t, as kernels take it.
inline void* current_cuda_stream(c10::Device device) {
  return c10::cuda::getCurrentCUDAStream(device.index()).stream();
}

}  // namespace memsave_ext
