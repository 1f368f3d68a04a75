#include "adam/items.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/view_as_complex.h>
#include <ATen/ops/view_as_real.h>

#include "adam/errors.h"
#include "adam/state.h"
#include "cuda_stream.h"
#include "vector/dtype.h"

namespace memsave_ext::adam {

using at::Tensor;

const Kernels& kernels_for(c10::Device device) {
  check_device(device);
#ifdef MEMSAVE_EXT_WITH_CUDA
  if (device.is_cuda()) return cuda_kernels;
#endif
  return cpu_kernels;
}

namespace {

Tensor as_real(const Tensor& tensor) {
  return tensor.is_complex() ? at::view_as_real(tensor) : tensor;
}

// Returns whether the memory does not hold the tensor's values: conjugate and negative views, and
// zeros without memory.
bool is_lazy(const Tensor& tensor) {
  constexpr c10::DispatchKeySet lazy(
      {c10::DispatchKey::Conjugate, c10::DispatchKey::Negative, c10::DispatchKey::ZeroTensor});
  return tensor.key_set().has_any(lazy);
}

// Returns whether two tensors of one shape have the same element order. Contiguous ones may differ
// in the strides of dimensions of size 1.
bool have_one_order(const Tensor& a, const Tensor& b) {
  return (a.is_contiguous() && b.is_contiguous()) || a.strides() == b.strides();
}

}  // namespace

DType real_dtype(at::ScalarType type) {
  const auto dtype = vector::dtype_of(c10::toRealValueType(type));
  TORCH_CHECK(dtype, "memsave_ext: tensors must be floating-point or complex, got ", type);
  return *dtype;
}

Tensor layout_of(const Tensor& tensor) {
  if (!tensor.is_non_overlapping_and_dense()) {
    return as_real(at::empty_like(tensor, at::MemoryFormat::Contiguous));
  }
  if (!tensor.is_complex() || !is_lazy(tensor)) return as_real(tensor);
  return as_real(at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options()));
}

void* Operands::of(const Tensor& tensor, const Tensor& like, bool changes) {
  if (!tensor.defined()) return nullptr;
  if (!is_lazy(tensor)) {
    if (!tensor.is_complex()) {
      if (have_one_order(tensor, like)) return tensor.mutable_data_ptr();
    } else if (const Tensor view = as_real(tensor); have_one_order(view, like)) {
      return view.mutable_data_ptr();
    }
  }
  const auto real = c10::toRealValueType(tensor.scalar_type());
  const Tensor copy = at::empty_strided(like.sizes(), like.strides(), tensor.options().dtype(real));
  const Tensor same = tensor.is_complex() ? at::view_as_complex(copy) : copy;
  same.copy_(tensor);
  copies_.push_back({changes ? tensor : Tensor(), same});
  return copy.mutable_data_ptr();
}

const float* Operands::number(const Tensor& of_one, c10::Device device) {
  if (of_one.device() == device) return of_one.const_data_ptr<float>();
  copies_.push_back({Tensor(), of_one.to(device)});
  return copies_.back().copy.const_data_ptr<float>();
}

void Operands::write_back() {
  for (const auto& [original, copy] : copies_) {
    if (original.defined()) original.copy_(copy);
  }
}

Item item_of(const Parameter& parameter, Operands& operands) {
  const State& state = parameter.state;
  const Group& group = *parameter.group;
  const int moments = row(group.options.rule).moments;
  const Tensor like = layout_of(parameter.local);
  Item item{};
  item.grad = operands.read(parameter.grad, like);
  item.param = operands.change(parameter.local, like);
  item.param_low_part = operands.change(state.param_low_part, like);
  if (moments > 0) item.exp_avg = operands.change(state.first(), like);
  if (moments > 1) item.exp_avg_sq = operands.change(state.exp_avg_sq, like);
  if (moments > 2) item.max_exp_avg_sq = operands.change(state.max_exp_avg_sq, like);
  item.numel = like.numel();
  item.param_type = real_dtype(parameter.local.scalar_type());
  item.param_format = param_format(parameter.local, group);
  item.state_format = state_format(parameter.local, state, group);
  if (in_blocks(item.state_format)) {
    item.exp_avg_scale = state.first_scale().mutable_data_ptr<float>();
    if (moments > 1) item.exp_avg_sq_scale = state.exp_avg_sq_scale.mutable_data_ptr<float>();
  }
  item.position = parameter.position;
  item.options = &group.options;
  if (group.lr.defined()) item.device_lr = operands.number(group.lr, parameter.local.device());
  return item;
}

namespace {

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

// Of a step on a device.
void check_counts_on_host(const std::vector<Item>& items, const std::vector<Parameter*>& of_items,
                          bool is_captured) {
  for (size_t i = 0; i < items.size(); ++i) {
    const Tensor& step = of_items[i]->state.step;
    if (!step.defined() || !step.device().is_cpu()) continue;
    TORCH_CHECK(items[i].skip == nullptr,
                "memsave_ext: with a GradScaler the state 'step' of a parameter must be on the "
                "parameter's device");
    if (is_captured) throw_error("count_in_graph");
  }
}

}  // namespace

void advance_steps(std::vector<Item>& items, std::vector<Parameter*>& of_items,
                   c10::Device device) {
  const bool on_cpu = device.is_cpu();
  if (!on_cpu) check_counts_on_host(items, of_items, is_capturing(device));
  std::vector<float*> steps;
  std::vector<const float*> skips;
  size_t kept = 0;
  for (size_t i = 0; i < items.size(); ++i) {
    Item item = items[i];
    if (on_cpu && item.skip != nullptr && *item.skip != 0) continue;
    const Tensor& step = of_items[i]->state.step;
    if (!step.defined()) {
      item.step = 0;
    } else if (step.device().is_cpu()) {
      advance_on_cpu(step);
      item.step = read_on_cpu(step);
    } else {
      item.device_step = step.const_data_ptr<float>();
      steps.push_back(step.mutable_data_ptr<float>());
      skips.push_back(item.skip);
    }
    of_items[kept] = of_items[i];
    items[kept++] = item;
  }
  items.resize(kept);
  of_items.resize(kept);
  if (steps.empty()) return;
  kernels_for(device).advance(steps.data(), skips.data(), static_cast<int64_t>(steps.size()),
                              stream_of(device));
}

void Factors::find(std::vector<Item>& items, c10::ArrayRef<Parameter*> parameters,
                   const Scaling& scaling) {
  if (scaling.factor.defined()) {
    const auto count = static_cast<int64_t>(items.size());
    for (const Tensor& of : {scaling.factor, scaling.skip}) {
      TORCH_CHECK_VALUE(!of.defined() || of.numel() == 1 || of.numel() == count,
                        "adam_step_: factor and skip must be scalars or have one element for each "
                        "parameter");
    }
    for (int64_t i = 0; i < count; ++i) {
      const auto of = [i](const Tensor& tensor) { return tensor.numel() == 1 ? 0 : i; };
      items[i].factor = scaling.factor.const_data_ptr<double>() + of(scaling.factor);
      if (!scaling.skip.defined()) continue;
      items[i].skip = scaling.skip.const_data_ptr<float>() + of(scaling.skip);
    }
    return;
  }
  // Measures each run of consecutive items that are clipped to the same norm in one call.
  for (size_t first = 0, end; first < items.size(); first = end) {
    const double max_norm = parameters[first]->group->max_grad_norm;
    end = first + 1;
    while (end < items.size() && parameters[end]->group->max_grad_norm == max_norm) ++end;
    if (max_norm > 0 || scaling.grad_scale.defined()) {
      measure(items.data() + first, static_cast<int64_t>(end - first), max_norm, scaling);
    }
  }
}

void Factors::measure(Item* items, int64_t count, double max_norm, const Scaling& scaling) {
  const auto bytes = kernels_.measure_workspace(items, count);
  const Tensor workspace = at::empty({bytes}, at::TensorOptions(device_).dtype(at::kByte));
  const auto kept = [&](at::ScalarType type) {
    return kept_.emplace_back(at::empty({count}, at::TensorOptions(device_).dtype(type)));
  };
  Measure measure{};
  measure.max_norm = max_norm;
  measure.factors = kept(at::kDouble).mutable_data_ptr<double>();
  const bool skips = scaling.grad_scale.defined();
  if (skips) {
    measure.grad_scale = scaling.grad_scale.const_data_ptr<float>();
    measure.skips = kept(at::kFloat).mutable_data_ptr<float>();
    measure.found_inf = scaling.found_inf.mutable_data_ptr<float>();
  }
  kernels_.measure(items, count, measure, workspace.mutable_data_ptr(), stream_);
  for (int64_t i = 0; i < count; ++i) {
    items[i].factor = measure.factors + i;
    if (skips) items[i].skip = measure.skips + i;
  }
}

}  // namespace memsave_ext::adam
