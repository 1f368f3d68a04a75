// A kernel that reports for which architecture the image was compiled that the driver chose.
#include <cuda_runtime.h>

#include "report/probe.h"
#include "vector/launch.cuh"

namespace memsave_ext {
namespace {

__global__ void probe_kernel(int* arch) {
#ifdef __CUDA_ARCH__
  *arch = __CUDA_ARCH__;
#endif
}

int launch_probe(int* device_arch) {
  launch(probe_kernel, 1, 1, 0, nullptr, device_arch);
  int arch = 0;
  check_cuda(cudaMemcpy(&arch, device_arch, sizeof(int), cudaMemcpyDeviceToHost));
  return arch;
}

}  // namespace

int probe_cuda() {
  int* device_arch = nullptr;
  check_cuda(cudaMalloc(&device_arch, sizeof(int)));
  try {
    const int arch = launch_probe(device_arch);
    check_cuda(cudaFree(device_arch));
    return arch;
  } catch (...) {
    cudaFree(device_arch);
    throw;
  }
}

}  // namespace memsave_ext
