// What csrc, but for its kernels, names of CUDA's runtime, for the emulated device. Its streams
// have their number in place of a pointer.
#pragma once

#include "device.h"
#include "managed.h"

#define CUDART_VERSION 13000

using cudaStream_t = void*;
enum cudaError_t { cudaSuccess };
enum cudaStreamCaptureStatus { cudaStreamCaptureStatusNone, cudaStreamCaptureStatusActive };
enum cudaDeviceAttr { cudaDevAttrConcurrentManagedAccess };
enum cudaMemLocationType { cudaMemLocationTypeDevice, cudaMemLocationTypeHost };
enum cudaMemoryAdvise { cudaMemAdviseSetPreferredLocation, cudaMemAdviseSetAccessedBy };
constexpr unsigned cudaMemAttachGlobal = 1;

struct cudaMemLocation {
  cudaMemLocationType type;
  int id;
};

inline cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
  *total = emulated::memory();
  *free = *total - static_cast<size_t>(emulated::bytes_allocated());
  return cudaSuccess;
}

inline cudaError_t cudaStreamGetCaptureInfo(cudaStream_t, cudaStreamCaptureStatus* status,
                                            unsigned long long* number) {
  *number = emulated::capture();
  *status = *number != 0 ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  return cudaSuccess;
}

inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr, int) {
  *value = 1;
  return cudaSuccess;
}

inline cudaError_t cudaMallocManaged(void** data, size_t bytes, unsigned) {
  *data = emulated::managed(bytes);
  return cudaSuccess;
}

inline cudaError_t cudaFree(void* data) {
  emulated::free_managed(data);
  return cudaSuccess;
}

inline cudaError_t cudaMemAdvise(const void*, size_t, cudaMemoryAdvise, cudaMemLocation) {
  return cudaSuccess;
}

inline cudaError_t cudaMemPrefetchAsync(const void* data, size_t bytes, cudaMemLocation to,
                                        unsigned, cudaStream_t stream) {
  emulated::move_managed(data, bytes, to.type == cudaMemLocationTypeDevice,
                         reinterpret_cast<intptr_t>(stream));
  return cudaSuccess;
}
