#pragma once

#include <c10/core/Device.h>

namespace memsave_ext::adam {

void* current_cuda_stream(c10::Device device);  // a cudaStream_t

}  // namespace memsave_ext::adam
