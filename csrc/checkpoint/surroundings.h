// What surrounds a forward and must surround its recompute: the settings that decide how an
// operator computes, autocast, the stream, random numbers and grad mode.
#pragma once

#include <ATen/Context.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/DeviceType.h>
#include <c10/core/ScalarType.h>
#include <c10/core/Stream.h>
#include <c10/core/StreamGuard.h>

#include <array>
#include <cstdint>
#include <memory>
#include <optional>

#include "checkpoint/recomputing.h"
#include "checkpoint/rng.h"
#include "checkpoint/rules.h"

namespace memsave_ext::checkpoint {

class Settings {
 public:
  // `products`: where the precisions of products are taken from, for an operator that makes none.
  // To ask torch for them takes most of the time.
  static Settings capture(const Settings* products = nullptr);
  bool operator==(const Settings& other) const;

 private:
  friend class SettingsGuard;
  // Sets what is different in `now`, which are the present ones.
  void restore(const Settings& now) const;
  void restore_float32(const Settings& now) const;

  c10::ScalarType default_dtype_;
  uint32_t flags_;  // a bit for each of kFlags in surroundings.cpp
  std::array<at::CuBLASReductionOption, 2> cublas_reductions_;  // of float16 and bfloat16
  at::LinalgBackend linalg_;
  std::array<at::Float32Precision, 9> float32_;  // one for each of kFloat32 in surroundings.cpp
};

class SettingsGuard {
 public:
  // `products`: whether the precisions of products matter; see Settings::capture().
  explicit SettingsGuard(const Settings& settings, bool products = true);
  ~SettingsGuard();
  SettingsGuard(const SettingsGuard&) = delete;
  SettingsGuard& operator=(const SettingsGuard&) = delete;

 private:
  Settings present() const { return Settings::capture(products_ ? nullptr : &settings_); }

  const Settings settings_;
  const bool products_;
  const Settings outer_;
  const bool needed_;
};

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
    c10::ScalarType dtype;  // also where it is off: the function may switch it on

    bool operator==(const Device& other) const {
      return enabled == other.enabled && dtype == other.dtype;
    }
  };
  bool any_enabled_;
  std::array<Device, kMostAutocastDevices> devices_{};
  bool cache_enabled_;
};

class AutocastGuard {
 public:
  explicit AutocastGuard(const AutocastState& state) : outer_(AutocastState::capture()) {
    // The cache matters where autocast is on.
    needed_ = state.any_enabled_ || outer_.any_enabled_ || state.devices_ != outer_.devices_;
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

// The current stream of the current CUDA device, if CUDA is in use.
std::optional<c10::Stream> current_cuda_stream();

// Makes `stream` and its device current. Where another stream was current, the work queued there
// is waited for on entry, and waits for ours on exit. The device waits, not the host.
class StreamScope {
 public:
  explicit StreamScope(const std::optional<c10::Stream>& stream);
  ~StreamScope();
  StreamScope(const StreamScope&) = delete;
  StreamScope& operator=(const StreamScope&) = delete;

 private:
  std::optional<c10::Stream> outer_;
  std::optional<c10::Stream> inner_;
  c10::OptionalStreamGuard guard_;
};

struct Surroundings {
  Settings settings;
  AutocastState autocast;
  std::shared_ptr<RngState> rng;  // null where random numbers are not replayed
  std::optional<c10::Stream> stream;
};

// Restores the surroundings of a forward, with grad mode on, for a recompute in this scope.
class RecomputeGuard {
 public:
  explicit RecomputeGuard(const Surroundings& surroundings)
      : stream_(surroundings.stream),
        settings_(surroundings.settings),
        autocast_(surroundings.autocast.without_cache()) {
    if (surroundings.rng) rng_.emplace(*surroundings.rng);
  }

 private:
  StreamScope stream_;
  SettingsGuard settings_;
  AutocastGuard autocast_;
  std::optional<RngGuard> rng_;
  at::AutoGradMode grad_mode_{true};
  RecomputeScope recomputing_;
};

}  // namespace memsave_ext::checkpoint
