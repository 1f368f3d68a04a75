// A copy of a log as tables, which memsave_ext/memory/account.py evaluates.
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
  // The caller holds the tracking mutex and has paused tracking on this thread.
  explicit Record(const Log& log);

  // int64 [changes, 6]: time in ns; training step; row of `blocks`, -1 for none (Event::block is
  // null, or a part begins); 1 allocated, -1 freed, 2 alive when its part of the log began; phase,
  // or the part's number in the row that begins it; live bytes.
  at::Tensor changes;
  // int64 [blocks, 5]: bytes; category; phase that made it; name as given to label(), -1 without;
  // module, -1 without.
  at::Tensor blocks;
  // What was recomputed: phase, module, calls, saved bytes, seconds.
  std::vector<std::tuple<int32_t, int32_t, int64_t, int64_t, double>> regions;

  // Returns the frames of a block's stack, innermost first: file, line, function. Empty where no
  // stack was taken. Needs the GIL.
  std::vector<std::tuple<std::string, int64_t, std::string>> stack(int64_t block) const;
  // Returns the name of the operator that made a block, as "aten::linear", or "".
  std::string operator_name(int64_t block) const;

 private:
  const Origin* origin(int64_t block) const;

  std::vector<std::shared_ptr<const Origin>> origins_;
};

}  // namespace memsave_ext::memory
