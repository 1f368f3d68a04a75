// Lets an operator draw the same random numbers again.
#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/ivalue.h>

#include <memory>
#include <optional>
#include <vector>

#include "checkpoint/rng.h"
#include "remat/operators.h"

namespace memsave_ext::remat {

// The state of an operator's generator before it ran.
struct Random {
  // A copy of its generator, which is passed to it, so that no generator in use is touched. Empty
  // where `defaults` is set.
  std::optional<at::Generator> generator;
  // The state of all default generators; null where `generator` is set.
  std::shared_ptr<const RngState> defaults;

  // Returns the present state for a call; nothing where the numbers cannot be drawn again.
  static std::optional<Random> of(const Operator& op, c10::ArrayRef<const c10::IValue> arguments);
};

// Makes the operator draw the same numbers in this scope.
class RandomGuard {
 public:
  RandomGuard(const Random& random, const Operator& op, std::vector<c10::IValue>& arguments);

 private:
  std::optional<RngGuard> defaults_;
};

}  // namespace memsave_ext::remat
