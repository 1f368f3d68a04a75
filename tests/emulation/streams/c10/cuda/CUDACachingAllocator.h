// What the package names of CUDA's caching allocator, for the emulated device.
#pragma once

#include <c10/core/CachingDeviceAllocator.h>
#include <c10/util/Registry.h>

#include <memory>
#include <string>

#include "cuda_runtime.h"

namespace c10 {

class FreeMemoryCallback {
 public:
  virtual ~FreeMemoryCallback() = default;
  virtual bool Execute() = 0;
};

// device.cpp has it, so that the package and the allocator share one.
Registry<std::string, std::unique_ptr<FreeMemoryCallback>>* FreeCudaMemoryCallbacksRegistry();

}  // namespace c10

namespace c10::cuda::CUDACachingAllocator {
inline double getMemoryFraction(DeviceIndex) { return 1; }
inline bool isHistoryEnabled() { return emulated::records_history; }
// device.cpp calls it with the allocator's lock, as CUDA's does.
void attachAllocatorTraceTracker(c10::CachingDeviceAllocator::AllocatorTraceTracker tracker);
}  // namespace c10::cuda::CUDACachingAllocator
