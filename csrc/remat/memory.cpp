#include "remat/memory.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>

#include "remat/fakes.h"
#include "remat/pause.h"
#include "store/device_copies.h"

namespace memsave_ext::remat {

c10::Storage empty_for(const Content& content) {
  // A fake tensor says that it is on a real device.
  const auto device = Fakes::current() != nullptr ? at::Device(at::kCPU) : content.device;
  const auto options = at::TensorOptions().dtype(at::kByte).device(device);
  return at::empty({content.bytes}, options).storage();
}

c10::Storage copy_of(const c10::Storage& storage) {
  const Pause pause;
  const at::NoGradGuard no_grad;
  const at::Tensor from = store::as_bytes(storage);
  at::Tensor to = at::empty(from.sizes(), from.options());
  to.copy_(from);
  return to.storage();
}

}  // namespace memsave_ext::remat
