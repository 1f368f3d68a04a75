#include "adam/items.h"

#include "adam/checks.h"

namespace memsave_ext::adam {

using at::Tensor;

const Kernels& kernels_for(c10::Device device) {
  check_device(device);
#ifdef MEMSAVE_EXT_WITH_CUDA
  if (device.is_cuda()) return cuda_kernels;
#endif
  return cpu_kernels;
}

Item item_of(const Parameter& parameter, Operands& operands) {
  const State& state = parameter.state;
  const Group& group = *parameter.group;
  const int moments = row(group.options.rule).moments;
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
  item.phase = parameter.phase;
  item.position = parameter.position;
  item.options = &group.options;
  if (group.lr.defined()) item.device_lr = group.lr.const_data_ptr<float>();
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

}  // namespace

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
    if (!step.defined()) {
      item.step = 0;
    } else if (step.device().is_cpu()) {
      TORCH_CHECK(
          on_cpu || item.skip == nullptr,
          "memsave_ext: with a GradScaler the state step of a parameter must be on its device");
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

}  // namespace memsave_ext::adam
