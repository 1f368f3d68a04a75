#include "adam/records.h"

#include <ATen/core/grad_mode.h>

#include <algorithm>

#include "adam/elsewhere.h"
#include "cuda_stream.h"

namespace memsave_ext::adam {

using at::Tensor;

namespace {

// Steps one after the other, so that no more than one has its state here.
void step_elsewhere(c10::ArrayRef<Parameter*> parameters, const Scaling& scaling) {
  const auto count = static_cast<int64_t>(parameters.size());
  for (int64_t i = 0; i < count; ++i) {
    const auto of_one = [&](const Tensor& of) {
      return of.defined() && of.numel() == count ? of.view(-1).narrow(0, i, 1) : of;
    };
    const Scaling scaled{scaling.grad_scale, scaling.found_inf, of_one(scaling.factor),
                         of_one(scaling.skip)};
    Parameter* const parameter = parameters[static_cast<size_t>(i)];
    if (!lies_elsewhere(*parameter)) {
      adam_step(parameter, scaled);
      continue;
    }
    const Fetched fetched(*parameter);
    adam_step(parameter, scaled);
    fetched.write_back();
  }
}

// Returns whether there is a low part, and both have versions: tensors of inference mode have none.
bool have_versions(const Tensor& param, const Tensor& low_part) {
  return low_part.defined() && !param.is_inference() && !low_part.is_inference();
}

}  // namespace

Records::Place Records::place_of(const Tensor& tensor) {
  return {tensor.storage().unsafeGetStorageImpl(), tensor.storage_offset()};
}

void Records::step(c10::ArrayRef<Parameter*> parameters, const Scaling& scaling) {
  for (const Parameter* parameter : parameters) {
    drop_stale_low_part(parameter->local, parameter->state.param_low_part);
  }
  if (std::any_of(parameters.begin(), parameters.end(),
                  [](const Parameter* parameter) { return lies_elsewhere(*parameter); })) {
    step_elsewhere(parameters, scaling);
  } else {
    adam_step(parameters, scaling);
  }
  for (const Parameter* parameter : parameters) note(*parameter);
}

std::unique_ptr<StepInRows> Records::step_in_rows(const Parameter& parameter) {
  drop_stale_low_part(parameter.local, parameter.state.param_low_part);
  auto begun = std::make_unique<StepInRows>(parameter);
  note(parameter);
  return begun;
}

// A low part that was loaded has no entry here, and belongs to the weights as they are. Under
// capture it stays: the graph would zero it in every replay.
void Records::drop_stale_low_part(const Tensor& param, const Tensor& low_part) const {
  if (!have_versions(param, low_part)) return;
  const auto found = versions_.find(place_of(low_part));
  if (found == versions_.end() || found->second.of_param == param._version() ||
      found->second.of_low_part != low_part._version() || is_capturing(param.device())) {
    return;
  }
  const at::NoGradGuard no_grad;
  low_part.zero_();
}

void Records::note(const Parameter& parameter) {
  const State& state = parameter.state;
  if (!have_versions(parameter.local, state.param_low_part)) return;
  const auto place = place_of(state.param_low_part);
  if (versions_.find(place) == versions_.end()) {  // seldom: also drops entries of freed tensors
    for (auto i = versions_.begin(); i != versions_.end();) {
      i = i->second.low_part.expired() ? versions_.erase(i) : std::next(i);
    }
  }
  versions_.insert_or_assign(place,
                             Versions{state.param_low_part.storage().getWeakStorageImpl(),
                                      static_cast<uint32_t>(parameter.local._version()),
                                      static_cast<uint32_t>(state.param_low_part._version())});
}

}  // namespace memsave_ext::adam
