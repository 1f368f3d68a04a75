#include "checkpoint/autocast.h"

#include <ATen/autocast_mode.h>

namespace memsave_ext {

AutocastState AutocastState::capture() {
  AutocastState state;
  for (size_t i = 0; i < kAutocastDevices.size(); ++i) {
    state.devices_[i] = {at::autocast::is_autocast_enabled(kAutocastDevices[i]),
                         at::autocast::get_autocast_dtype(kAutocastDevices[i])};
  }
  state.cache_enabled_ = at::autocast::is_autocast_cache_enabled();
  return state;
}

void AutocastState::restore() const {
  for (size_t i = 0; i < kAutocastDevices.size(); ++i) {
    at::autocast::set_autocast_enabled(kAutocastDevices[i], devices_[i].enabled);
    at::autocast::set_autocast_dtype(kAutocastDevices[i], devices_[i].dtype);
  }
  at::autocast::set_autocast_cache_enabled(cache_enabled_);
}

AutocastState AutocastState::without_cache() const {
  AutocastState state = *this;
  state.cache_enabled_ = false;
  return state;
}

}  // namespace memsave_ext
