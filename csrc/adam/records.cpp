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

// Tensors of inference mode have none.
bool has_versions(const Update& update) {
  return update.state.param_rest.defined() && !is_fold(update.phase) &&
         !update.param.is_inference() && !update.state.param_rest.is_inference();
}

}  // namespace

Records::Place Records::place_of(const Tensor& tensor) {
  return {tensor.storage().unsafeGetStorageImpl(), tensor.storage_offset()};
}

void Records::step(c10::ArrayRef<Update> updates, const Scaling& scaling) {
  for (const Update& update : updates) drop_stale_rest(update);
  step_all(updates, scaling);
  for (const Update& update : updates) note(update);
}

bool Records::is_folded(const State& state) const {
  return !folded_.empty() && state.defined() && folded_.count(place_of(state.exp_avg_sq)) > 0;
}

// Where it was loaded, nothing is known of it, and it belongs to the weights. A graph would drop it
// in every replay.
void Records::drop_stale_rest(const Update& update) const {
  if (!has_versions(update)) return;
  const Tensor& rest = update.state.param_rest;
  const auto found = versions_.find(place_of(rest));
  if (found == versions_.end() || found->second.of_param == update.param._version() ||
      found->second.of_rest != rest._version() || is_captured(update.param)) {
    return;
  }
  const at::NoGradGuard no_grad;
  rest.zero_();
}

void Records::note(const Update& update) {
  const State& state = update.state;
  if (is_fold(update.phase)) {
    folded_.emplace(place_of(state.exp_avg_sq), state.exp_avg_sq);
  } else if (!folded_.empty()) {
    folded_.erase(place_of(state.exp_avg_sq));
  }
  if (!has_versions(update)) return;
  const auto place = place_of(state.param_rest);
  if (versions_.find(place) == versions_.end()) {  // seldom: time to look for those that are gone
    for (auto i = versions_.begin(); i != versions_.end();) {
      i = i->second.rest.expired() ? versions_.erase(i) : std::next(i);
    }
  }
  versions_.insert_or_assign(place, Versions{state.param_rest.storage().getWeakStorageImpl(),
                                             static_cast<uint32_t>(update.param._version()),
                                             static_cast<uint32_t>(state.param_rest._version())});
}

}  // namespace memsave_ext::adam
