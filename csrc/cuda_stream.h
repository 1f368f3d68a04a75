// The current stream of a device, in builds with CUDA and without.
#pragma once

#include <c10/core/Device.h>

#ifdef MEMSAVE_EXT_WITH_CUDA
#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#endif

namespace memsave_ext {

// Returns a cudaStream_t, as kernels take it; null where the device is not a CUDA device.
inline void* stream_of([[maybe_unused]] c10::Device device) {
#ifdef MEMSAVE_EXT_WITH_CUDA
  if (device.is_cuda()) return c10::cuda::getCurrentCUDAStream(device.index()).stream();
#endif
  return nullptr;
}

// Whether the stream is being captured into a CUDA graph.
inline bool is_capturing([[maybe_unused]] c10::Device device) {
#ifdef MEMSAVE_EXT_WITH_CUDA
  if (device.is_cuda()) {
    const c10::cuda::CUDAGuard on_device(device);
    return c10::cuda::currentStreamCaptureStatusMayInitCtx() != c10::cuda::CaptureStatus::None;
  }
#endif
  return false;
}

}  // namespace memsave_ext
