#include "checkpoint/autocast.h"

#include <ATen/autocast_mode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

namespace memsave_ext {

AutocastState AutocastState::capture() {
  AutocastState state;
  state.cache_enabled_ = at::autocast::is_autocast_cache_enabled();
  // Autocast is on where its key is not excluded, as it is by default.
  state.any_enabled_ =
      !c10::impl::tls_local_dispatch_key_set().excluded_.has_all(c10::autocast_dispatch_keyset);
  if (!state.any_enabled_) return state;
  for (size_t i = 0; i < kAutocastDevices.size(); ++i) {
    state.devices_[i] = {at::autocast::is_autocast_enabled(kAutocastDevices[i]),
                         at::autocast::get_autocast_dtype(kAutocastDevices[i])};
  }
  return state;
}

void AutocastState::restore() const {
  for (size_t i = 0; i < kAutocastDevices.size(); ++i) {
    at::autocast::set_autocast_enabled(kAutocastDevices[i], devices_[i].enabled);
    if (any_enabled_) at::autocast::set_autocast_dtype(kAutocastDevices[i], devices_[i].dtype);
  }
  at::autocast::set_autocast_cache_enabled(cache_enabled_);
}

AutocastState AutocastState::without_cache() const {
  AutocastState state = *this;
  state.cache_enabled_ = false;
  return state;
}

}  // namespace memsave_ext
