// Pauses tracking on one thread, so that the tracking's own allocations do not count.
#pragma once

namespace memsave_ext::memory {

inline thread_local int paused_depth = 0;

inline void pause_tracking(bool paused) { paused_depth += paused ? 1 : -1; }

class PauseTracking {
 public:
  PauseTracking() { pause_tracking(true); }
  ~PauseTracking() { pause_tracking(false); }
  PauseTracking(const PauseTracking&) = delete;
  PauseTracking& operator=(const PauseTracking&) = delete;
};

}  // namespace memsave_ext::memory
