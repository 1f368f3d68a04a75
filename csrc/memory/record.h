// A copy of a log in columns, for memsave_ext/memory/account.py to add up.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include "memory/log.h"

namespace memsave_ext::memory {

class Record {
 public:
  // With the tracking mutex held and this thread's tracking paused.
  explicit Record(const Log& log);

  // int64 [changes, 6]: time in ns; training step; row of `blocks`, -1 for memory of before
  // tracking; 1 allocated, -1 freed, 2 there when its part of the log began; phase; live bytes.
  at::Tensor changes;
  // int64 [blocks, 5]: bytes; category; phase that made it; name as given to label(), module: -1
  // without.
  at::Tensor blocks;
  // module, calls, saved bytes, seconds
  std::vector<std::tuple<int32_t, int64_t, int64_t, double>> regions;

  // Innermost first: file, line, function. Needs the GIL.
  std::vector<std::tuple<std::string, int64_t, std::string>> stack(int64_t block) const;

 private:
  std::vector<std::shared_ptr<torch::CapturedTraceback>> stacks_;
};

}  // namespace memsave_ext::memory
