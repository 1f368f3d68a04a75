#include "checkpoint/device.h"

#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <pybind11/pybind11.h>
#include <torch/csrc/utils/device_lazy_init.h>

#include <atomic>

#include "streams.h"

namespace memsave_ext {

bool cuda_in_use() {
  static const bool built_with_cuda = at::detail::getCUDAHooks().hasCUDART();
  if (!built_with_cuda) return false;
  static std::atomic<bool> initialised{false};
  if (!initialised) {
    // C++ does not export this flag; torch.cuda keeps it. Operators are recorded without the GIL.
    const pybind11::gil_scoped_acquire gil;
    initialised = pybind11::module_::import("torch.cuda").attr("_initialized").cast<bool>();
  }
  return initialised && !torch::utils::is_device_in_bad_fork(at::kCUDA);
}

std::optional<c10::Stream> current_cuda_stream() {
  if (!cuda_in_use()) return std::nullopt;
  const c10::impl::VirtualGuardImpl cuda(c10::DeviceType::CUDA);
  return cuda.getStream(cuda.getDevice());
}

StreamScope::StreamScope(const std::optional<c10::Stream>& stream) {
  if (!stream) return;
  const c10::impl::VirtualGuardImpl cuda(c10::DeviceType::CUDA);
  const c10::Stream current = cuda.getStream(stream->device());
  guard_.reset_stream(*stream);
  if (current != *stream) {
    outer_ = current;
    inner_ = stream;
    order_after(*inner_, *outer_);
  }
}

StreamScope::~StreamScope() {
  if (!outer_) return;
  try {
    order_after(*outer_, *inner_);
  } catch (const std::exception& error) {
    TORCH_WARN("CheckpointFunction: could not order the streams after a recompute: ", error.what());
  }
}

}  // namespace memsave_ext
