// What csrc names of c10's CUDA library, for the emulated device.
#pragma once

#include <c10/core/Device.h>
#include <c10/util/Exception.h>

#include "cuda_runtime.h"

#define C10_CUDA_CHECK(call) TORCH_CHECK((call) == cudaSuccess)

namespace c10::cuda {

class CUDAStream {
 public:
  DeviceIndex device_index() const { return 0; }
  cudaStream_t stream() const {
    return reinterpret_cast<cudaStream_t>(static_cast<intptr_t>(emulated::current_stream()));
  }
};

inline CUDAStream getCurrentCUDAStream(DeviceIndex = 0) { return {}; }
inline DeviceIndex current_device() { return 0; }
inline bool hasPrimaryContext(DeviceIndex) { return true; }

struct CUDAGuard {
  explicit CUDAGuard(Device) {}
};

enum class CaptureStatus { None, Active };
inline CaptureStatus currentStreamCaptureStatusMayInitCtx() {
  return emulated::capture() != 0 ? CaptureStatus::Active : CaptureStatus::None;
}

}  // namespace c10::cuda
