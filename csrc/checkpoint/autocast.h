// The autocast state of a region's forward, restored for its recompute.
#pragma once

#include <c10/core/DeviceType.h>
#include <c10/core/ScalarType.h>

#include <array>

namespace memsave_ext {

// The device types whose autocast state is carried over.
inline constexpr std::array kAutocastDevices{c10::DeviceType::CPU, c10::DeviceType::CUDA,
                                             c10::DeviceType::XPU, c10::DeviceType::MPS};

class AutocastState {
 public:
  static AutocastState capture();
  void restore() const;
  // The same state with the cache of casted weights off. Casts made without a graph must not be
  // found later by operations that need one, nor those of a recompute by the next.
  AutocastState without_cache() const;

 private:
  friend class AutocastGuard;
  struct Device {
    bool enabled;
    c10::ScalarType dtype;
  };
  bool any_enabled_;
  std::array<Device, kAutocastDevices.size()> devices_{};  // read only where any_enabled_
  bool cache_enabled_;
};

class AutocastGuard {
 public:
  // Where autocast is off now and was off in the forward, this costs one look at the dispatcher's
  // keys.
  explicit AutocastGuard(const AutocastState& state) : outer_(AutocastState::capture()) {
    needed_ = state.any_enabled_ || outer_.any_enabled_;
    if (needed_) state.restore();
  }
  ~AutocastGuard() {
    if (needed_) outer_.restore();
  }
  AutocastGuard(const AutocastGuard&) = delete;
  AutocastGuard& operator=(const AutocastGuard&) = delete;

 private:
  AutocastState outer_;
  bool needed_;
};

}  // namespace memsave_ext
