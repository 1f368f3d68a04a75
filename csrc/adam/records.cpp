#include "adam/records.h"

#include <ATen/core/grad_mode.h>

#ifdef MEMSAVE_EXT_WITH_CUDA
#include "cuda_stream.h"
#endif

namespace memsave_ext::adam {

using at::Tensor;

namespace {

bool is_captured([[maybe_unused]] const Tensor& param) {
#ifdef MEMSAVE_EXT_WITH_CUDA
  return param.is_cuda() && is_capturing(param.device());
#else
  return false;
#endif
}

// Returns whether the versions of the parameter and its rest matter and exist: tensors of inference
// mode have none.
bool has_versions(const Parameter& parameter) {
  const Tensor& rest = parameter.state.param_rest;
  return rest.defined() && !is_fold(parameter.phase) && !parameter.local.is_inference() &&
         !rest.is_inference();
}

}  // namespace

Records::Place Records::place_of(const Tensor& tensor) {
  return {tensor.storage().unsafeGetStorageImpl(), tensor.storage_offset()};
}

void Records::step(c10::ArrayRef<Parameter*> parameters, const Scaling& scaling) {
  for (const Parameter* parameter : parameters) drop_stale_rest(*parameter);
  step_all(parameters, scaling);
  for (const Parameter* parameter : parameters) note(*parameter);
}

std::unique_ptr<StepInRows> Records::step_in_rows(const Parameter& parameter) {
  drop_stale_rest(parameter);
  auto begun = std::make_unique<StepInRows>(parameter);
  note(parameter);
  return begun;
}

bool Records::is_folded(const State& state) const {
  return !folded_.empty() && state.defined() && folded_.count(place_of(state.exp_avg_sq)) > 0;
}

// A rest that was loaded has no entry here, and belongs to the weights as they are. Under capture
// it stays: the graph would zero it in every replay.
void Records::drop_stale_rest(const Parameter& parameter) const {
  if (!has_versions(parameter)) return;
  const Tensor& rest = parameter.state.param_rest;
  const auto found = versions_.find(place_of(rest));
  if (found == versions_.end() || found->second.of_param == parameter.local._version() ||
      found->second.of_rest != rest._version() || is_captured(parameter.local)) {
    return;
  }
  const at::NoGradGuard no_grad;
  rest.zero_();
}

void Records::note(const Parameter& parameter) {
  const State& state = parameter.state;
  if (is_fold(parameter.phase)) {
    folded_.emplace(place_of(state.exp_avg_sq), state.exp_avg_sq);
  } else if (!folded_.empty()) {
    folded_.erase(place_of(state.exp_avg_sq));
  }
  if (!has_versions(parameter)) return;
  const auto place = place_of(state.param_rest);
  if (versions_.find(place) == versions_.end()) {  // seldom: also drops entries of freed tensors
    for (auto i = versions_.begin(); i != versions_.end();) {
      i = i->second.rest.expired() ? versions_.erase(i) : std::next(i);
    }
  }
  versions_.insert_or_assign(place, Versions{state.param_rest.storage().getWeakStorageImpl(),
                                             static_cast<uint32_t>(parameter.local._version()),
                                             static_cast<uint32_t>(state.param_rest._version())});
}

}  // namespace memsave_ext::adam
