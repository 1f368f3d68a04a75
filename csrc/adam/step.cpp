#include "adam/step.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/view_as_complex.h>
#include <ATen/ops/view_as_real.h>
#include <c10/core/DeviceGuard.h>
#include <torch/csrc/autograd/variable.h>

#include <vector>

#include "checkpoint/stepped.h"
#include "vector/dtype.h"

#ifdef MEMSAVE_EXT_WITH_CUDA
#include "cuda_stream.h"
#endif

namespace memsave_ext::adam {

using at::Tensor;

namespace {

// Complex values are pairs of real ones.
DType real_dtype(at::ScalarType type) {
  const auto dtype = vector::dtype_of(c10::toRealValueType(type));
  TORCH_CHECK(dtype, "Adam: tensors must be floating-point or complex, got ", type);
  return *dtype;
}

const Kernels& kernels_for(c10::Device device) {
#ifdef MEMSAVE_EXT_WITH_CUDA
  if (device.is_cuda()) return cuda_kernels;
#endif
  TORCH_CHECK(device.is_cpu(), "Adam: this build of memsave_ext has no kernel for ", device.type(),
              " (python -m memsave_ext.report says what was built). Use torch.optim.Adam there.");
  return cpu_kernels;
}

void* stream_of([[maybe_unused]] c10::Device device) {
#ifdef MEMSAVE_EXT_WITH_CUDA
  if (device.is_cuda()) return current_cuda_stream(device);
#endif
  return nullptr;
}

Tensor as_real(const Tensor& tensor) {
  return tensor.is_complex() ? at::view_as_real(tensor) : tensor;
}

// Whose memory is not what it stands for: conjugate and negative views, and zeros without memory.
bool is_lazy(const Tensor& tensor) {
  return tensor.is_conj() || tensor.is_neg() || tensor._is_zerotensor();
}

// A tensor of real numbers in the order in which kernels are given those of `tensor`.
Tensor layout_of(const Tensor& tensor) {
  if (!tensor.is_non_overlapping_and_dense()) {
    return as_real(at::empty_like(tensor, at::MemoryFormat::Contiguous));
  }
  if (!tensor.is_complex() || !is_lazy(tensor)) return as_real(tensor);
  return as_real(at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options()));
}

// Memory of tensors in the order of elements of their parameter: their own, or copies that are
// written back.
class Operands {
 public:
  void* read(const Tensor& tensor, const Tensor& like) { return of(tensor, like, false); }
  void* change(const Tensor& tensor, const Tensor& like) { return of(tensor, like, true); }

  void write_back() {
    for (const auto& [original, copy] : copies_) {
      if (original.defined()) original.copy_(copy);
    }
  }

 private:
  struct Copy {
    Tensor original, copy;
  };

  void* of(const Tensor& tensor, const Tensor& like, bool changes) {
    if (!tensor.defined()) return nullptr;
    if (!is_lazy(tensor)) {
      if (!tensor.is_complex() && tensor.strides() == like.strides()) {
        return tensor.mutable_data_ptr();
      }
      const Tensor view = as_real(tensor);
      if (view.strides() == like.strides()) return view.mutable_data_ptr();
    }
    const auto real = c10::toRealValueType(tensor.scalar_type());
    const Tensor copy =
        at::empty_strided(like.sizes(), like.strides(), tensor.options().dtype(real));
    const Tensor same = tensor.is_complex() ? at::view_as_complex(copy) : copy;
    same.copy_(tensor);
    copies_.push_back({changes ? tensor : Tensor(), same});
    return copy.mutable_data_ptr();
  }

  std::vector<Copy> copies_;
};

Item item_of(const Update& update, Operands& operands) {
  const auto& [param, grad, state, group, phase, position] = update;
  const Tensor like = layout_of(param);
  Item item{};
  item.grad = operands.read(grad, like);
  // A fold leaves them as they are, their versions too.
  item.param = is_fold(phase) ? operands.read(param, like) : operands.change(param, like);
  item.param_rest = is_fold(phase) ? operands.read(state.param_rest, like)
                                   : operands.change(state.param_rest, like);
  item.exp_avg = operands.change(state.exp_avg, like);
  item.exp_avg_sq = operands.change(state.exp_avg_sq, like);
  if (group->options.amsgrad) item.max_exp_avg_sq = operands.change(state.max_exp_avg_sq, like);
  item.numel = like.numel();
  item.param_type = real_dtype(param.scalar_type());
  item.param_format = param_format(param, *group);
  item.state_format = state_format(param, state, *group);
  if (item.state_format == StateFormat::kBlocks) {
    item.exp_avg_scale = state.exp_avg_scale.mutable_data_ptr<float>();
    item.exp_avg_sq_scale = state.exp_avg_sq_scale.mutable_data_ptr<float>();
  }
  item.phase = phase;
  item.position = position;
  item.options = &group->options;
  if (group->lr.defined()) item.device_lr = group->lr.const_data_ptr<float>();
  return item;
}

// Factors and skips of items, and the memory they are in.
class Factors {
 public:
  Factors(const Kernels& kernels, c10::Device device, void* stream)
      : kernels_(kernels), device_(device), stream_(stream) {}

  void find(std::vector<Item>& items, const std::vector<const Update*>& updates,
            const Scaling& scaling) {
    if (scaling.factor.defined()) {
      for (auto& item : items) {
        item.factor = scaling.factor.const_data_ptr<double>();
        if (scaling.skip.defined()) item.skip = scaling.skip.const_data_ptr<float>();
      }
      return;
    }
    // Runs of items that are clipped to the same norm.
    for (size_t first = 0, end; first < items.size(); first = end) {
      const double max_norm = updates[first]->group->max_grad_norm;
      end = first + 1;
      while (end < items.size() && updates[end]->group->max_grad_norm == max_norm) ++end;
      if (max_norm > 0 || scaling.loss_scale.defined()) {
        measure(items.data() + first, static_cast<int64_t>(end - first), max_norm, scaling);
      }
    }
  }

 private:
  void measure(Item* items, int64_t count, double max_norm, const Scaling& scaling) {
    const auto bytes = kernels_.measure_workspace(items, count);
    const Tensor workspace = at::empty({bytes}, at::TensorOptions(device_).dtype(at::kByte));
    const auto kept = [&](at::ScalarType type) {
      return kept_.emplace_back(at::empty({count}, at::TensorOptions(device_).dtype(type)));
    };
    Measure measure{};
    measure.max_norm = max_norm;
    measure.factors = kept(at::kDouble).mutable_data_ptr<double>();
    const bool skips = scaling.loss_scale.defined();
    if (skips) {
      measure.loss_scale = scaling.loss_scale.const_data_ptr<float>();
      measure.skips = kept(at::kFloat).mutable_data_ptr<float>();
      measure.found = scaling.found.mutable_data_ptr<float>();
    }
    kernels_.measure(items, count, measure, workspace.mutable_data_ptr(), stream_);
    for (int64_t i = 0; i < count; ++i) {
      items[i].factor = measure.factors + i;
      if (skips) items[i].skip = measure.skips + i;
    }
  }

  const Kernels& kernels_;
  const c10::Device device_;
  void* const stream_;
  std::vector<Tensor> kept_;
};

double read_on_cpu(const Tensor& step) {
  return step.scalar_type() == at::kDouble ? *step.const_data_ptr<double>()
                                           : *step.const_data_ptr<float>();
}

void advance_on_cpu(const Tensor& step) {
  if (step.scalar_type() == at::kDouble) {
    *step.mutable_data_ptr<double>() += 1;
  } else {
    *step.mutable_data_ptr<float>() += 1;
  }
}

// The number of the step that each item makes. On CPUs, items that are skipped go.
void advance_steps(std::vector<Item>& items, std::vector<const Update*>& updates,
                   const Kernels& kernels, bool on_cpu, void* stream) {
  std::vector<float*> steps;
  std::vector<const float*> skips;
  size_t kept = 0;
  for (size_t i = 0; i < items.size(); ++i) {
    Item item = items[i];
    if (on_cpu && item.skip != nullptr && *item.skip != 0) continue;
    const Tensor& step = updates[i]->state.step;
    const bool advances = !is_fold(item.phase);
    if (step.device().is_cpu()) {
      TORCH_CHECK(on_cpu || item.skip == nullptr,
                  "Adam: with a GradScaler the state step of a parameter must be on its device");
      if (advances) advance_on_cpu(step);
      item.step = read_on_cpu(step) + !advances;
    } else {
      item.device_step = step.const_data_ptr<float>();
      if (advances) {
        steps.push_back(step.mutable_data_ptr<float>());
        skips.push_back(item.skip);
      }
    }
    updates[kept] = updates[i];
    items[kept++] = item;
  }
  items.resize(kept);
  updates.resize(kept);
  if (steps.empty()) return;
  kernels.advance(steps.data(), skips.data(), static_cast<int64_t>(steps.size()), stream);
}

void check_dense(const Tensor& grad) {
  TORCH_CHECK(grad.layout() == at::kStrided,
              "Adam does not support sparse gradients, please consider SparseAdam instead");
}

void check_memory(const char* name, const Tensor& tensor) {
  if (tensor.numel() == 0 || tensor._is_zerotensor()) return;
  TORCH_CHECK(tensor.has_storage() && tensor.storage().data() != nullptr, "Adam: ", name,
              " is a tensor subclass without memory of its own, which kernels cannot step. Use "
              "torch.optim.Adam for it.");
}

}  // namespace

void check_update(const Update& u) {
  check_memory("a parameter", u.param);
  if (u.grad.defined()) {
    check_dense(u.grad);
    TORCH_CHECK(u.grad.sizes() == u.param.sizes() && u.grad.device() == u.param.device() &&
                    u.grad.scalar_type() == u.param.scalar_type(),
                "Adam: a gradient must have the shape, dtype and device of its parameter, ",
                u.param.sizes(), " ", u.param.scalar_type(), " ", u.param.device(), ", got ",
                u.grad.sizes(), " ", u.grad.scalar_type(), " ", u.grad.device());
    check_memory("a gradient", u.grad);
  }
  check_state(u.param, u.state, *u.group);
  if (u.phase == Phase::kWhole) return;
  const auto type = c10::toRealValueType(u.state.exp_avg.scalar_type());
  TORCH_CHECK(type == at::kFloat || type == at::kDouble,
              "Adam: accumulate(fold=True) needs states of float32 or float64, got ",
              u.state.exp_avg.scalar_type(), ". Use accumulate() or state_dtype=None.");
}

void step_all(c10::ArrayRef<Update> updates, const Scaling& scaling) {
  if (updates.empty()) return;
  const auto device = updates.front().param.device();
  const auto& kernels = kernels_for(device);
  void* const stream = stream_of(device);
  const at::NoGradGuard no_grad;
  const c10::DeviceGuard on_device(device);

  Operands operands;
  std::vector<Item> items;
  std::vector<const Update*> of_items;
  items.reserve(updates.size());
  of_items.reserve(updates.size());
  for (const auto& update : updates) {
    items.push_back(item_of(update, operands));
    of_items.push_back(&update);
  }
  Factors factors(kernels, device, stream);
  factors.find(items, of_items, scaling);
  advance_steps(items, of_items, kernels, device.is_cpu(), stream);
  kernels.step(items.data(), static_cast<int64_t>(items.size()), stream);
  operands.write_back();
  for (const Update* update : of_items) {
    if (is_fold(update->phase) || update->param.is_inference()) continue;
    torch::autograd::impl::bump_version(update->param);
    note_step(update->param, update->position);
  }
}

Tensor sum_of_squares(c10::ArrayRef<Tensor> grads) {
  const auto device = grads.front().device();
  const auto& kernels = kernels_for(device);
  const at::NoGradGuard no_grad;
  const c10::DeviceGuard on_device(device);
  Operands operands;
  std::vector<Item> items;
  for (const Tensor& grad : grads) {
    check_dense(grad);
    const Tensor like = layout_of(grad);
    Item item{};
    item.grad = operands.read(grad, like);
    item.numel = like.numel();
    item.param_type = real_dtype(grad.scalar_type());
    items.push_back(item);
  }
  const auto count = static_cast<int64_t>(items.size());
  const auto options = at::TensorOptions(device);
  const auto bytes = kernels.measure_workspace(items.data(), count);
  const Tensor workspace = at::empty({bytes}, options.dtype(at::kByte));
  const Tensor squares = at::empty({count}, options.dtype(at::kDouble));
  Measure measure{};
  measure.squares = squares.mutable_data_ptr<double>();
  kernels.measure(items.data(), count, measure, workspace.mutable_data_ptr(), stream_of(device));
  return squares.sum();
}

}  // namespace memsave_ext::adam
