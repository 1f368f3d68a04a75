// Keeps blocks from recording on this thread.
#pragma once

namespace memsave_ext::remat {

// Stops recording on this thread for a scope, as during a recompute.
class Pause {
 public:
  Pause() { ++pauses_; }
  ~Pause() { --pauses_; }
  Pause(const Pause&) = delete;
  Pause& operator=(const Pause&) = delete;

  static bool is_on() { return pauses_ > 0; }

 private:
  static inline thread_local int pauses_ = 0;
};

}  // namespace memsave_ext::remat
