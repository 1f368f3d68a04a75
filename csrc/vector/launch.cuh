// Launching a kernel, and turning CUDA's errors into exceptions.
#pragma once

#include <cuda_runtime.h>

#include <climits>
#include <cstdint>
#include <stdexcept>
#include <string>

namespace memsave_ext {

inline void check_cuda(cudaError_t status) {
  if (status != cudaSuccess) {
    cudaGetLastError();  // Not sticky: the next torch call must not report our failure.
    throw std::runtime_error(std::string("memsave_ext: CUDA: ") + cudaGetErrorString(status) +
                             ". What fails here, and what to switch off, says "
                             "`python -m memsave_ext.check`");
  }
}

template <typename... Parameters, typename... Arguments>
void launch(void (*kernel)(Parameters...), int64_t blocks, int threads, size_t shared_bytes,
            void* stream, const Arguments&... arguments) {
  if (blocks == 0) return;
  if (blocks > INT_MAX) {
    throw std::runtime_error("memsave_ext: CUDA: a kernel would need " + std::to_string(blocks) +
                             " blocks, more than there can be");
  }
  kernel<<<static_cast<unsigned>(blocks), threads, shared_bytes,
           static_cast<cudaStream_t>(stream)>>>(arguments...);
  check_cuda(cudaGetLastError());
}

}  // namespace memsave_ext
