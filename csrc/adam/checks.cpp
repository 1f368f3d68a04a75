#include "adam/checks.h"

namespace memsave_ext::adam {

using at::Tensor;

namespace {

void check_memory(const char* name, const Tensor& tensor) {
  if (tensor.numel() == 0 || tensor._is_zerotensor()) return;
  // Meta and fake tensors never come to a kernel that reads them.
  if (tensor.has_storage() && tensor.storage().device().is_meta()) return;
  TORCH_CHECK(tensor.has_storage() && tensor.storage().data() != nullptr, "Adam: ", name,
              " is a tensor subclass without memory of its own, which kernels cannot step. Use "
              "torch.optim.Adam for it.");
}

void check_grad(const Tensor& grad, const Tensor& param) {
  check_dense(grad);
  TORCH_CHECK(grad.sizes() == param.sizes() && grad.device() == param.device() &&
                  grad.scalar_type() == param.scalar_type(),
              "Adam: a gradient must have the shape, dtype and device of its parameter, ",
              param.sizes(), " ", param.scalar_type(), " ", param.device(), ", got ", grad.sizes(),
              " ", grad.scalar_type(), " ", grad.device());
  check_memory("a gradient", grad);
}

}  // namespace

void check_device(c10::Device device) {
#ifdef MEMSAVE_EXT_WITH_CUDA
  if (device.is_cuda()) return;
#endif
  TORCH_CHECK(device.is_cpu() || device.is_meta(),
              "Adam: this build of memsave_ext has no kernel for ", device.type(),
              " (python -m memsave_ext.report says what was built). Use torch.optim.Adam there.");
}

void check_dense(const Tensor& grad) {
  TORCH_CHECK(grad.layout() == at::kStrided,
              "Adam does not support sparse gradients, please consider SparseAdam instead");
}

void check_step(const Tensor& param, const Tensor& grad, const State& state, const Group& group,
                Phase phase) {
  check_memory("a parameter", param);
  if (grad.defined()) check_grad(grad, param);
  check_state(param, state, group);
  if (phase == Phase::kWhole) return;
  const auto type = c10::toRealValueType(state.exp_avg.scalar_type());
  TORCH_CHECK(type == at::kFloat || type == at::kDouble,
              "Adam: accumulate(fold=True) needs states of float32 or float64, got ",
              state.exp_avg.scalar_type(), ". Use accumulate() or state_dtype=None.");
}

}  // namespace memsave_ext::adam
