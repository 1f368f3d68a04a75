#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime.h>

#include <memory>

#include "store/device_copies.h"
#include "store/managed.h"

namespace memsave_ext::store {
namespace {

#if CUDART_VERSION >= 13000
using Place = cudaMemLocation;
Place on_device(int device) { return {cudaMemLocationTypeDevice, device}; }
Place on_host() { return {cudaMemLocationTypeHost, 0}; }
cudaError_t move(const void* data, size_t bytes, Place to, cudaStream_t stream) {
  return cudaMemPrefetchAsync(data, bytes, to, 0, stream);
}
#else
using Place = int;
Place on_device(int device) { return device; }
Place on_host() { return cudaCpuDeviceId; }
cudaError_t move(const void* data, size_t bytes, Place to, cudaStream_t stream) {
  return cudaMemPrefetchAsync(data, bytes, to, stream);
}
#endif

struct Memory {
  void* data = nullptr;
  int64_t owner;

  explicit Memory(int64_t owner) : owner(owner) {}
  // Waits for the device, as nobody knows which streams use it. A process that ends may have none
  // any more.
  ~Memory() { (void)cudaFree(data); }
};

void free_memory(void* memory) { delete static_cast<Memory*>(memory); }

}  // namespace

at::Tensor managed_memory(int64_t bytes, c10::Device device, int64_t owner) {
  const c10::cuda::CUDAGuard on_this(device);
  int concurrent = 0;
  C10_CUDA_CHECK(
      cudaDeviceGetAttribute(&concurrent, cudaDevAttrConcurrentManagedAccess, device.index()));
  TORCH_CHECK_VALUE(concurrent != 0, "the driver of ", device,
                    " does not move memory by pages, as it does on Linux");
  auto memory = std::make_unique<Memory>(owner);
  const auto size = static_cast<size_t>(bytes);
  C10_CUDA_CHECK(cudaMallocManaged(&memory->data, size, cudaMemAttachGlobal));
  // What was not moved before is read where it is, without a fault for each page.
  const auto advise = [&](cudaMemoryAdvise advice, Place place) {
    C10_CUDA_CHECK(cudaMemAdvise(memory->data, size, advice, place));
  };
  advise(cudaMemAdviseSetPreferredLocation, on_host());
  advise(cudaMemAdviseSetAccessedBy, on_device(device.index()));
  void* const data = memory->data;
  return as_bytes(c10::Storage(c10::Storage::use_byte_size_t(), size,
                               {data, memory.release(), &free_memory, device}));
}

int64_t managed_owner(const at::Tensor& tensor) {
  if (!tensor.has_storage()) return 0;
  const auto* memory = tensor.storage().data_ptr().cast_context<Memory>(&free_memory);
  return memory == nullptr ? 0 : memory->owner;
}

void move_managed(const std::vector<at::Tensor>& tensors, bool to_device) {
  if (tensors.empty()) return;
  const c10::Device device = tensors.front().device();
  const c10::cuda::CUDAGuard on_this(device);
  const cudaStream_t stream = c10::cuda::getCurrentCUDAStream(device.index()).stream();
  const Place to = to_device ? on_device(device.index()) : on_host();
  for (const at::Tensor& tensor : tensors) {
    C10_CUDA_CHECK(move(tensor.const_data_ptr(), tensor.nbytes(), to, stream));
  }
}

}  // namespace memsave_ext::store
