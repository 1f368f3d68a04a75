// A kernel that reports which of the compiled images the driver chose.
#include <cuda_runtime.h>

#include <stdexcept>
#include <string>

#include "report/probe.h"

namespace memsave_ext {
namespace {

__global__ void probe_kernel(int* arch) {
#ifdef __CUDA_ARCH__
  *arch = __CUDA_ARCH__;
#endif
}

void check(cudaError_t status) {
  if (status != cudaSuccess) {
    cudaGetLastError();  // Not sticky: the next torch call must not report our failure.
    throw std::runtime_error(cudaGetErrorString(status));
  }
}

int launch_probe(int* device_arch) {
  probe_kernel<<<1, 1>>>(device_arch);
  check(cudaGetLastError());
  int arch = 0;
  check(cudaMemcpy(&arch, device_arch, sizeof(int), cudaMemcpyDeviceToHost));
  return arch;
}

}  // namespace

int probe_cuda() {
  int* device_arch = nullptr;
  check(cudaMalloc(&device_arch, sizeof(int)));
  try {
    const int arch = launch_probe(device_arch);
    check(cudaFree(device_arch));
    return arch;
  } catch (...) {
    cudaFree(device_arch);
    throw;
  }
}

}  // namespace memsave_ext
