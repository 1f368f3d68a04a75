// The running backwards that reach an optimizer's parameters.
#pragma once

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "adam/snapshot.h"

namespace memsave_ext::adam {

class Backward;
class Stepper;

// The caller holds the stepper's mutex, except for begin().
class Backwards {
 public:
  // Returns the backward of the graph task that this thread works for; null where there is none.
  std::shared_ptr<Backward> current() const;
  // Returns current(), and begins one where there is none. Returns null outside of a backward, as
  // step() will apply those gradients, and when the optimizer is gone. The caller holds neither
  // the mutex nor the GIL.
  std::shared_ptr<Backward> begin(Stepper& stepper);
  // Notes that a backward has ended, finished or not.
  void end_one();
  // Throws while any backward runs. `call`: what cannot be called then.
  void check_none(const char* call) const;
  // Makes this the shared snapshot, and notes in each entry its parameter's position there.
  void use_snapshot(const std::shared_ptr<Snapshot>& snapshot);

 private:
  // By id of the graph task.
  std::vector<std::pair<int64_t, std::weak_ptr<Backward>>> by_task_;
  int64_t running_ = 0;
  uint64_t ended_ = 0;                // number of backwards that have ever ended
  std::weak_ptr<Snapshot> snapshot_;  // that the running backwards share
  uint64_t snapshots_ = 0;            // number of snapshots ever used
};

}  // namespace memsave_ext::adam
