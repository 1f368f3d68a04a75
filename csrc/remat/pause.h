// Keeps blocks from recording on this thread.
#pragma once

namespace memsave_ext::remat {

// Stops recording on this thread for a scope, as during a recompute.
class Pause {
 public:
  Pause();
  ~Pause();
  Pause(const Pause&) = delete;
  Pause& operator=(const Pause&) = delete;

  static bool is_on();
};

}  // namespace memsave_ext::remat
