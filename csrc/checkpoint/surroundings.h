// What surrounds a forward and must surround its recompute.
#pragma once

#include <ATen/core/grad_mode.h>

#include <memory>
#include <optional>

#include "checkpoint/autocast.h"
#include "checkpoint/device.h"
#include "checkpoint/recomputing.h"
#include "checkpoint/rng.h"
#include "checkpoint/settings.h"

namespace memsave_ext {

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

}  // namespace memsave_ext
