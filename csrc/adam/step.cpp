#include "adam/step.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/view_as_real.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/DeviceGuard.h>
#include <torch/csrc/autograd/variable.h>

#include <vector>

#ifdef MEMSAVE_EXT_WITH_CUDA
#include "cuda_stream.h"
#endif

namespace memsave_ext::adam {

using at::Tensor;

namespace {

bool is_kernel_type(at::ScalarType type) {
  return type == at::kDouble || type == at::kFloat || type == at::kHalf || type == at::kBFloat16;
}

DType dtype_of(at::ScalarType type) {
  switch (type) {
    case at::kDouble:
      return DType::kDouble;
    case at::kFloat:
      return DType::kFloat;
    case at::kHalf:
      return DType::kHalf;
    default:
      return DType::kBFloat16;
  }
}

const Kernels& kernels_for(c10::Device device) {
#ifdef MEMSAVE_EXT_WITH_CUDA
  if (device.is_cuda()) return cuda_kernels;
#endif
  TORCH_CHECK(device.is_cpu(), "Adam: this build of memsave_ext has no kernel for ", device.type(),
              " (python -m memsave_ext.report says what was built). Use torch.optim.Adam there.");
  return cpu_kernels;
}

Tensor as_real(const Tensor& tensor) {
  return tensor.is_complex() ? at::view_as_real(tensor) : tensor;
}

// A copy in the parameter's order of elements, of a tensor in another.
struct Reordered {
  Tensor original, copy;
};

void check_state(const char* name, const Tensor& tensor, const Tensor& param, at::ScalarType type) {
  TORCH_CHECK(tensor.defined(), "Adam: the state of a parameter has no ", name);
  TORCH_CHECK(tensor.device() == param.device() && tensor.sizes() == param.sizes(),
              "Adam: the state ", name, " of a parameter is a tensor of shape ", tensor.sizes(),
              " on ", tensor.device(), ", the parameter one of shape ", param.sizes(), " on ",
              param.device(),
              ". Move the model before making the optimizer, or load the optimizer's state_dict() "
              "into it again.");
  TORCH_CHECK(tensor.scalar_type() == type, "Adam: the state ", name, " of a parameter is ",
              tensor.scalar_type(), ", exp_avg is ", type);
}

void advance_on_cpu(const Tensor& step) {
  if (step.scalar_type() == at::kDouble) {
    *step.mutable_data_ptr<double>() += 1;
  } else {
    *step.mutable_data_ptr<float>() += 1;
  }
}

double read_on_cpu(const Tensor& step) {
  return step.scalar_type() == at::kDouble ? *step.const_data_ptr<double>()
                                           : *step.const_data_ptr<float>();
}

}  // namespace

State make_state(const Tensor& param, const Group& group) {
  const at::NoGradGuard no_grad;
  const auto type = param.scalar_type();
  const bool short_type = type == at::kHalf || type == at::kBFloat16;
  const auto options = param.options().dtype(short_type ? at::kFloat : type);
  const auto zeros = [&] { return at::zeros_like(param, options, at::MemoryFormat::Preserve); };
  const auto device = group.step_on_device ? param.device() : c10::Device(c10::kCPU);
  return {at::zeros({}, at::TensorOptions().dtype(at::kFloat).device(device)), zeros(), zeros(),
          group.options.amsgrad ? zeros() : Tensor()};
}

void check_update(const Update& u) {
  TORCH_CHECK(!u.grad.is_sparse(),
              "Adam does not support sparse gradients, please consider SparseAdam instead");
  TORCH_CHECK(u.grad.sizes() == u.param.sizes() && u.grad.device() == u.param.device() &&
                  u.grad.scalar_type() == u.param.scalar_type(),
              "Adam: a gradient must have the shape, dtype and device of its parameter, ",
              u.param.sizes(), " ", u.param.scalar_type(), " ", u.param.device(), ", got ",
              u.grad.sizes(), " ", u.grad.scalar_type(), " ", u.grad.device());
  const auto type = c10::toRealValueType(u.param.scalar_type());
  TORCH_CHECK(is_kernel_type(type), "Adam: parameters must be floating-point or complex, got ",
              u.param.scalar_type());
  const auto& state = u.state;
  TORCH_CHECK(
      state.step.defined() && state.step.numel() == 1 &&
          (state.step.device().is_cpu()
               ? state.step.scalar_type() == at::kFloat || state.step.scalar_type() == at::kDouble
               : state.step.device() == u.param.device() && state.step.scalar_type() == at::kFloat),
      "Adam: the state step of a parameter must be a floating-point scalar tensor on the "
      "CPU, or float32 on the parameter's device");
  TORCH_CHECK(state.exp_avg.defined(), "Adam: the state of a parameter has no exp_avg");
  const auto state_type = state.exp_avg.scalar_type();
  const auto real_state = c10::toRealValueType(state_type);
  TORCH_CHECK(real_state == type || (real_state == at::kFloat && type != at::kDouble),
              "Adam: the state exp_avg of a ", u.param.scalar_type(),
              " parameter must be of its type or float, got ", state_type);
  check_state("exp_avg", state.exp_avg, u.param, state_type);
  check_state("exp_avg_sq", state.exp_avg_sq, u.param, state_type);
  if (u.group->options.amsgrad) {
    check_state("max_exp_avg_sq", state.max_exp_avg_sq, u.param, state_type);
  }
}

void step_all(c10::ArrayRef<Update> updates) {
  if (updates.empty()) return;
  const auto device = updates.front().param.device();
  const auto& kernels = kernels_for(device);
  const at::NoGradGuard no_grad;
  const c10::DeviceGuard on_device(device);

  std::vector<Item> items;
  items.reserve(updates.size());
  std::vector<Reordered> reordered;
  std::vector<float*> device_steps;
  for (const auto& [param, grad, state, group] : updates) {
    if (param.numel() == 0) {
      if (state.step.device().is_cpu()) advance_on_cpu(state.step);
      continue;
    }
    Tensor like = as_real(param);
    if (!param.is_non_overlapping_and_dense()) {
      like = at::empty_like(like, at::MemoryFormat::Contiguous);
    }
    const auto data = [&](const Tensor& tensor) -> void* {
      if (!tensor.defined()) return nullptr;
      if (!tensor.is_complex() && tensor.strides() == like.strides()) {
        return tensor.mutable_data_ptr();
      }
      const Tensor view = as_real(tensor);
      if (view.strides() == like.strides()) return view.mutable_data_ptr();
      reordered.push_back({view, at::empty_strided(like.sizes(), like.strides(), view.options())});
      reordered.back().copy.copy_(view);
      return reordered.back().copy.mutable_data_ptr();
    };
    Item item{};
    item.grad = data(grad);
    if (!reordered.empty() && reordered.back().copy.const_data_ptr() == item.grad) {
      reordered.back().original = Tensor();  // not written back
    }
    item.param = data(param);
    item.exp_avg = data(state.exp_avg);
    item.exp_avg_sq = data(state.exp_avg_sq);
    item.max_exp_avg_sq = group->options.amsgrad ? data(state.max_exp_avg_sq) : nullptr;
    item.numel = like.numel();
    item.param_type = dtype_of(like.scalar_type());
    item.state_type = dtype_of(c10::toRealValueType(state.exp_avg.scalar_type()));
    item.options = &group->options;
    if (group->lr.defined()) item.device_lr = group->lr.const_data_ptr<float>();
    if (state.step.device().is_cpu()) {
      advance_on_cpu(state.step);
      item.step = read_on_cpu(state.step);
    } else {
      device_steps.push_back(state.step.mutable_data_ptr<float>());
      item.device_step = device_steps.back();
    }
    items.push_back(item);
  }
  void* stream = nullptr;
#ifdef MEMSAVE_EXT_WITH_CUDA
  if (device.is_cuda()) stream = current_cuda_stream(device);
#endif
  if (!device_steps.empty()) {
    kernels.advance(device_steps.data(), static_cast<int64_t>(device_steps.size()), stream);
  }
  kernels.step(items.data(), static_cast<int64_t>(items.size()), stream);
  for (const auto& [original, copy] : reordered) {
    if (original.defined()) original.copy_(copy);
  }
  for (const auto& update : updates) {
    if (!update.param.is_inference()) torch::autograd::impl::bump_version(update.param);
  }
}

}  // namespace memsave_ext::adam
