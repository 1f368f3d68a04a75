#include "adam/checks.h"

#include "adam/given.h"

namespace memsave_ext::adam {

using at::Tensor;

namespace {

void check_memory(const char* name, const Tensor& tensor) {
  const auto* storage = tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl();
  if (storage != nullptr && storage->data() != nullptr) return;
  if (tensor.numel() == 0 || tensor._is_zerotensor()) return;
  // Meta and fake tensors pass: no kernel reads their memory.
  TORCH_CHECK(storage != nullptr && storage->device().is_meta(), "memsave_ext: ", name,
              " is a tensor subclass without memory of its own, which kernels cannot step. Use "
              "torch's optimizer for it.");
}

void check_grad(const Tensor& grad, const Tensor& param, const Group& group) {
  check_dense(grad, group.options.rule);
  if (grad.sizes() != param.sizes() || grad.device() != param.device() ||
      grad.scalar_type() != param.scalar_type()) {
    throw_error("wrong_gradient", param, grad);
  }
  check_memory("a gradient", grad);
}

}  // namespace

void check_device(c10::Device device) {
#ifdef MEMSAVE_EXT_WITH_CUDA
  if (device.is_cuda()) return;
#endif
  TORCH_CHECK(device.is_cpu() || device.is_meta(),
              "memsave_ext: this build of memsave_ext has no kernel for ", device.type(),
              " (python -m memsave_ext.report says what was built). Use torch's optimizer there.");
}

void check_dense(const Tensor& grad, Rule rule) {
  if (grad.layout() != at::kStrided) throw_error("sparse", row(rule).name);
}

void check_step(const Tensor& param, const Tensor& grad, const State& state, const Group& group,
                StepPhase phase) {
  check_memory("a parameter", param);
  if (grad.defined()) check_grad(grad, param, group);
  check_state(param, state, group);
  if (phase == StepPhase::kWhole) return;
  const auto moments = state.first().scalar_type();
  const auto type = c10::toRealValueType(moments);
  if (type != at::kFloat && type != at::kDouble) throw_error("cannot_fold", moments);
}

}  // namespace memsave_ext::adam
