// The dispatcher's operators of Adam. Schemas: memsave_ext/_ops.py.
#include "adam/ops.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <c10/core/DeviceGuard.h>
#include <torch/csrc/autograd/variable.h>

#include <vector>

#include "adam/arguments.h"
#include "adam/checks.h"
#include "adam/factors.h"
#include "adam/kernels.h"
#include "adam/operands.h"
#include "checkpoint/stepped.h"

#ifdef MEMSAVE_EXT_WITH_CUDA
#include "cuda_stream.h"
#endif

namespace memsave_ext::adam {

using at::Tensor;

namespace {

const Kernels& kernels_for(c10::Device device) {
  check_device(device);
#ifdef MEMSAVE_EXT_WITH_CUDA
  if (device.is_cuda()) return cuda_kernels;
#endif
  return cpu_kernels;
}

void* stream_of([[maybe_unused]] c10::Device device) {
#ifdef MEMSAVE_EXT_WITH_CUDA
  if (device.is_cuda()) return current_cuda_stream(device);
#endif
  return nullptr;
}

Item item_of(const Parameter& parameter, Operands& operands) {
  const State& state = parameter.state;
  const Group& group = *parameter.group;
  const Tensor like = layout_of(parameter.local);
  // A fold changes neither the parameter nor its low part, and copying back would bump their
  // versions.
  const auto kept_by_fold = [&](const Tensor& tensor) {
    return is_fold(parameter.phase) ? operands.read(tensor, like) : operands.change(tensor, like);
  };
  Item item{};
  item.grad = operands.read(parameter.grad, like);
  item.param = kept_by_fold(parameter.local);
  item.param_low_part = kept_by_fold(state.param_low_part);
  item.exp_avg = operands.change(state.exp_avg, like);
  item.exp_avg_sq = operands.change(state.exp_avg_sq, like);
  if (group.options.amsgrad) item.max_exp_avg_sq = operands.change(state.max_exp_avg_sq, like);
  item.numel = like.numel();
  item.param_type = real_dtype(parameter.local.scalar_type());
  item.param_format = param_format(parameter.local, group);
  item.state_format = state_format(parameter.local, state, group);
  if (item.state_format == StateFormat::kBlocks) {
    item.exp_avg_scale = state.exp_avg_scale.mutable_data_ptr<float>();
    item.exp_avg_sq_scale = state.exp_avg_sq_scale.mutable_data_ptr<float>();
  }
  item.phase = parameter.phase;
  item.position = parameter.position;
  item.options = &group.options;
  if (group.lr.defined()) item.device_lr = group.lr.const_data_ptr<float>();
  return item;
}

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

// Advances the step counts, except of folds, and sets in each item the number of the step it makes.
// On CPUs, removes the items that are skipped, and their parameters.
void advance_steps(std::vector<Item>& items, std::vector<Parameter*>& of_items,
                   const Kernels& kernels, bool on_cpu, void* stream) {
  std::vector<float*> steps;
  std::vector<const float*> skips;
  size_t kept = 0;
  for (size_t i = 0; i < items.size(); ++i) {
    Item item = items[i];
    if (on_cpu && item.skip != nullptr && *item.skip != 0) continue;
    const Tensor& step = of_items[i]->state.step;
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
    of_items[kept] = of_items[i];
    items[kept++] = item;
  }
  items.resize(kept);
  of_items.resize(kept);
  if (steps.empty()) return;
  kernels.advance(steps.data(), skips.data(), static_cast<int64_t>(steps.size()), stream);
}

}  // namespace

void step_on_device(c10::ArrayRef<Parameter*> parameters, const Scaling& scaling) {
  const auto device = parameters.front()->local.device();
  const auto& kernels = kernels_for(device);
  void* const stream = stream_of(device);
  const at::NoGradGuard no_grad;
  const c10::DeviceGuard on_device(device);

  Operands operands;
  std::vector<Item> items;
  std::vector<Parameter*> of_items = parameters.vec();
  items.reserve(parameters.size());
  for (const Parameter* parameter : parameters) items.push_back(item_of(*parameter, operands));
  Factors factors(kernels, device, stream);
  factors.find(items, parameters, scaling);
  advance_steps(items, of_items, kernels, device.is_cpu(), stream);
  kernels.step(items.data(), static_cast<int64_t>(items.size()), stream);
  operands.write_back();
  for (const Parameter* parameter : of_items) {
    if (is_fold(parameter->phase) || parameter->local.is_inference()) continue;
    torch::autograd::impl::bump_version(parameter->local);
    note_step(parameter->local, parameter->position);
  }
}

namespace {

// `is_meta`: checks everything and does nothing.
template <bool is_meta>
void adam_step_(at::TensorList params, at::TensorList grads, at::TensorList states,
                at::IntArrayRef present, at::IntArrayRef phases, at::IntArrayRef positions,
                at::IntArrayRef groups, at::ArrayRef<double> options, at::IntArrayRef modes,
                at::TensorList lrs, const std::optional<Tensor>& grad_scale,
                const std::optional<Tensor>& found_inf, const std::optional<Tensor>& factor,
                const std::optional<Tensor>& skip) {
  Unpacked of =
      unpack({params, grads, states, present, phases, positions, groups, options, modes, lrs});
  std::vector<Parameter*> parameters;
  for (Parameter& parameter : of.parameters) {
    parameters.push_back(&parameter);
    // Symbolic sizes are of a trace: the kernel that runs later checks.
    if (is_meta && parameter.local.unsafeGetTensorImpl()->has_symbolic_sizes_strides()) continue;
    check_step(parameter.local, parameter.grad, parameter.state, *parameter.group, parameter.phase);
    TORCH_CHECK_VALUE(parameter.local.device() == params[0].device(),
                      "adam_step_: params must lie on one device, got ", params[0].device(),
                      " and ", parameter.local.device());
  }
  if (is_meta || parameters.empty()) return;
  step_on_device(parameters, {grad_scale.value_or(Tensor()), found_inf.value_or(Tensor()),
                              factor.value_or(Tensor()), skip.value_or(Tensor())});
}

Tensor adam_sum_of_squares(at::TensorList grads) {
  TORCH_CHECK_VALUE(!grads.empty(), "adam_sum_of_squares: grads is empty");
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

Tensor sum_of_squares_on_meta(at::TensorList grads) {
  for (const Tensor& grad : grads) check_dense(grad);
  return at::empty({}, at::TensorOptions(at::kMeta).dtype(at::kDouble));
}

}  // namespace

void register_operators(torch::Library& library) {
  library.impl("adam_step_", adam_step_<false>);
  library.impl("adam_sum_of_squares", adam_sum_of_squares);
}

}  // namespace memsave_ext::adam

TORCH_LIBRARY_IMPL(memsave_ext, CPU, library) { memsave_ext::adam::register_operators(library); }

TORCH_LIBRARY_IMPL(memsave_ext, Meta, library) {
  library.impl("adam_step_", memsave_ext::adam::adam_step_<true>);
  library.impl("adam_sum_of_squares", memsave_ext::adam::sum_of_squares_on_meta);
}
