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
#include "adam/items.h"
#include "checkpoint/stepped.h"

namespace memsave_ext::adam {

using at::Tensor;

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
