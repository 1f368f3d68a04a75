// The backwards of an optimizer's parameters that run at this moment.
#pragma once

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "adam/snapshot.h"

namespace memsave_ext::adam {

class Backward;
class Stepper;

// Used with the stepper's mutex, but begin().
class Backwards {
 public:
  // That of the graph task that this thread works for; null where there is none.
  std::shared_ptr<Backward> current() const;
  // Likewise, and it begins where there is none. Null outside of a backward, whose gradients step()
  // will apply, and when the optimizer is gone. Without the mutex and the GIL.
  std::shared_ptr<Backward> begin(Stepper& stepper);
  // One has ended, or was destroyed unfinished.
  void end_one();
  // Throws where one runs.
  void check_none() const;
  // From now on entries say where they stand in this snapshot.
  void use_snapshot(const std::shared_ptr<Snapshot>& snapshot);

 private:
  std::vector<std::pair<int64_t, std::weak_ptr<Backward>>> by_task_;
  int64_t running_ = 0;
  uint64_t ended_ = 0;  // in all
  std::weak_ptr<Snapshot> snapshot_;
  uint64_t snapshots_ = 0;  // in all
};

}  // namespace memsave_ext::adam
