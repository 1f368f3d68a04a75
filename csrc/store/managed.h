// Managed memory of CUDA: the host's, which kernels use as they use a device's own, wherever it is.
// What is moved to the device before its use is as fast as that.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

namespace memsave_ext::store {

// Bytes that lie in the host's memory, as a tensor on the device; `owner` is not 0. Throws where
// there is no room, or where the device cannot use them while the host does.
at::Tensor managed_memory(int64_t bytes, c10::Device device, int64_t owner);

// Whose memory a tensor has; 0 where it is other memory.
int64_t managed_owner(const at::Tensor& tensor);

// Moves such tensors, of one device, in the order of its current stream. Who uses them meanwhile
// is slow, never wrong.
void move_managed(const std::vector<at::Tensor>& tensors, bool to_device);

}  // namespace memsave_ext::store
