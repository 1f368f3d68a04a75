// What csrc names of c10's CUDA library, for the emulated device. Its streams have their number in
// place of a pointer.
#pragma once

#include <c10/core/Device.h>
#include <c10/util/Exception.h>

#include "device.h"

using cudaStream_t = void*;
enum cudaStreamCaptureStatus { cudaStreamCaptureStatusNone, cudaStreamCaptureStatusActive };

inline bool cudaStreamGetCaptureInfo(cudaStream_t, cudaStreamCaptureStatus* status,
                                     unsigned long long* number) {
  *number = emulated::capture();
  *status = *number != 0 ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  return true;
}

#define C10_CUDA_CHECK(call) TORCH_CHECK(call)

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
