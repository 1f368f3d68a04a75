#include "adam/factors.h"

#include <ATen/ops/empty.h>

namespace memsave_ext::adam {

using at::Tensor;

void Factors::find(std::vector<Item>& items, c10::ArrayRef<Parameter*> parameters,
                   const Scaling& scaling) {
  if (scaling.factor.defined()) {
    for (auto& item : items) {
      item.factor = scaling.factor.const_data_ptr<double>();
      if (scaling.skip.defined()) item.skip = scaling.skip.const_data_ptr<float>();
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
