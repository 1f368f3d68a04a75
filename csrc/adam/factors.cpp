#include "adam/factors.h"

#include <ATen/ops/empty.h>

namespace memsave_ext::adam {

using at::Tensor;

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
