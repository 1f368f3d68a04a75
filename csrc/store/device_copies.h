// Copies between a device and pinned memory of the host, as operators of torch.
#pragma once

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <c10/core/Storage.h>
#include <c10/core/Stream.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/TensorOptions.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/VirtualGuardImpl.h>

namespace memsave_ext::store {

inline c10::Stream stream_for_copies(c10::Device device) {
  return c10::impl::VirtualGuardImpl(device.type()).getStreamFromGlobalPool(device);
}

// What runs here is no part of a step: autograd does not record it, no mode of Python is asked.
class AsideOfSteps {
 private:
  const at::NoGradGuard no_grad_;
  const at::AutoDispatchBelowADInplaceOrView below_;
  const c10::impl::ExcludeDispatchKeyGuard no_modes_{c10::python_ks};
};

inline at::Tensor pinned_memory_of(int64_t bytes) {
  return at::empty({bytes}, at::TensorOptions().dtype(at::kByte).pinned_memory(true));
}

// Returns a byte tensor on the whole storage.
inline at::Tensor as_bytes(const c10::Storage& storage) {
  const c10::DispatchKeySet keys(
      c10::computeDispatchKey(at::kByte, at::kStrided, storage.device()));
  at::Tensor tensor = at::detail::make_tensor<c10::TensorImpl>(
      c10::TensorImpl::VIEW, c10::Storage(storage), keys, caffe2::TypeMeta::Make<uint8_t>());
  tensor.unsafeGetTensorImpl()->set_sizes_contiguous({static_cast<int64_t>(storage.nbytes())});
  return tensor;
}

}  // namespace memsave_ext::store
