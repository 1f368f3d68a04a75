#include "adam/rows.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/record_function.h>
#include <c10/core/DeviceGuard.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <vector>

#include "adam/elsewhere.h"
#include "adam/items.h"
#include "adam/ops.h"
#include "checkpoint/stepped.h"

namespace memsave_ext::adam {

using at::Tensor;

namespace {

// Of a prediction, which has no values: its memory is on the meta device.
bool is_fake(const Tensor& tensor) {
  return tensor.key_set().has(c10::DispatchKey::Python) && tensor.has_storage() &&
         tensor.storage().device().is_meta();
}

int64_t bytes_of(const Tensor& tensor) { return tensor.defined() ? tensor.element_size() : 0; }

}  // namespace

const char* StepInRows::obstacle(const Parameter& parameter) {
  const Tensor& param = parameter.local;
  if (lies_elsewhere(parameter)) {
    return "states_on= keeps the optimizer states elsewhere, and fetches them as a whole";
  }
  const at::AutoDispatchBelowADInplaceOrView guard;  // autograd has no part in a step
  if (!is_fake(param) &&
      (!needs_only_kernels(parameter) || param.is_meta() || param.is_inference())) {
    return "the weight is not an ordinary tensor";
  }
  const auto in_rows = [](const Tensor& tensor) {
    return !tensor.defined() || tensor.dim() == 0 || tensor.is_contiguous();
  };
  bool all = in_rows(param) && !param.is_complex();
  for (const auto& state : kStateNames) all = all && in_rows(parameter.state.*state.tensor);
  return all ? nullptr : "the rows of the weight, or of its states, are not contiguous in memory";
}

StepInRows::StepInRows(const Parameter& parameter)
    : param_(parameter.local), state_(parameter.state), group_(*parameter.group) {
  if (is_fake(param_)) {
    checkpoint::note_step(param_, parameter.position);
    return;
  }
  const auto device = param_.device();
  const c10::DeviceGuard on_device(device);
  Parameter advanced = parameter;
  std::vector<Item> items = {item_of(parameter, operands_)};
  std::vector<Parameter*> of_items = {&advanced};
  advance_steps(items, of_items, device);
  whole_ = items.front();
  whole_.options = &group_.options;
  torch::autograd::impl::bump_version(param_);
  checkpoint::note_step(param_, parameter.position);
}

void StepInRows::step(int64_t first, const Tensor& grad) const {
  if (is_fake(param_)) return;
  RECORD_FUNCTION("memsave_ext::adam_step_rows", std::vector<c10::IValue>{});
  const int64_t row = param_.numel() / std::max<int64_t>(1, param_.size(0));
  const int64_t begin = first * row;
  TORCH_CHECK(first >= 0 && begin % kBlock == 0 && begin + grad.numel() <= param_.numel() &&
                  grad.is_contiguous() && grad.scalar_type() == param_.scalar_type() &&
                  grad.device() == param_.device(),
              "memsave_ext: these rows cannot be stepped: ", grad.sizes(), " from ", first, " on");
  const auto moved = [begin](void* memory, const Tensor& of) -> void* {
    return memory == nullptr ? nullptr : static_cast<char*>(memory) + begin * bytes_of(of);
  };
  Item item = whole_;
  item.param = moved(item.param, param_);
  item.param_low_part = moved(item.param_low_part, state_.param_low_part);
  item.grad = grad.const_data_ptr();
  item.exp_avg = moved(item.exp_avg, state_.first());
  item.exp_avg_sq = moved(item.exp_avg_sq, state_.exp_avg_sq);
  item.max_exp_avg_sq = moved(item.max_exp_avg_sq, state_.max_exp_avg_sq);
  if (item.exp_avg_scale != nullptr) {
    const int64_t blocks = blocks_of(item.state_format, begin);
    item.exp_avg_scale += blocks;
    if (item.exp_avg_sq_scale != nullptr) item.exp_avg_sq_scale += blocks;
  }
  item.numel = grad.numel();
  item.first_block = begin / kBlock;
  const c10::DeviceGuard on_device(param_.device());
  kernels_for(param_.device()).step(&item, 1, stream_of(param_.device()));
}

}  // namespace memsave_ext::adam
