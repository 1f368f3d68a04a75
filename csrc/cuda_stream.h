#pragma once

#include <c10/core/Device.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

namespace memsave_ext {

// A cudaStream_t, as kernels take it.
inline void* current_cuda_stream(c10::Device device) {
  return c10::cuda::getCurrentCUDAStream(device.index()).stream();
}

// Whether the current stream is being captured into a CUDA graph.
inline bool is_capturing(c10::Device device) {
  const c10::cuda::CUDAGuard on_device(device);
  return c10::cuda::currentStreamCaptureStatusMayInitCtx() != c10::cuda::CaptureStatus::None;
}

}  // namespace memsave_ext
