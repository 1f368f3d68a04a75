// Saved-tensor hooks without Python: an autograd engine that hands out C++ hooks.
#pragma once

#include <cstddef>
#include <memory>

#include "checkpoint/hooks.h"

namespace memsave_ext {

// Puts an engine in front of torch's that, while enabled, gives a region's saved tensors C++ hooks.
// It forwards everything else. The engine is installed by the first call with true, process-wide,
// and stays; disabled, it only forwards. Returns what was set before.
bool use_engine_hooks(bool enabled);

// While it lives, the engine gives the packer what autograd saves on this thread, unless a hook was
// pushed since. It is not on torch's stack of hooks, because torch.func transforms run only where
// that is empty; what they save is kept. Scopes of a thread are nested.
class EngineHookGuard {
 public:
  explicit EngineHookGuard(std::shared_ptr<Packer> packer);
  ~EngineHookGuard();
  EngineHookGuard(const EngineHookGuard&) = delete;
  EngineHookGuard& operator=(const EngineHookGuard&) = delete;

  // The packer of this thread's innermost scope; null where a hook was pushed since.
  static std::shared_ptr<Packer> packer();

 private:
  const std::shared_ptr<Packer> packer_;
  const size_t depth_;  // of torch's stack of hooks when it was made
  EngineHookGuard* const outer_;
};

}  // namespace memsave_ext
