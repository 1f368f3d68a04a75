// Random numbers that an operator drew, to be drawn again.
#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/ivalue.h>

#include <memory>
#include <optional>
#include <vector>

#include "checkpoint/rng.h"
#include "remat/operators.h"

namespace memsave_ext::remat {

// Where its generator stood. Of an operator that takes one, a copy of it, which is handed to it;
// so that nobody's generator is touched. Otherwise the state of all default generators.
struct Random {
  std::optional<at::Generator> generator;
  std::shared_ptr<const RngState> defaults;

  // Nothing where the numbers cannot be drawn again.
  static std::optional<Random> of(const Operator& op, c10::ArrayRef<const c10::IValue> arguments);
};

// The operator draws the same numbers in this scope.
class RandomGuard {
 public:
  RandomGuard(const Random& random, const Operator& op, std::vector<c10::IValue>& arguments);

 private:
  std::optional<RngGuard> defaults_;
};

}  // namespace memsave_ext::remat
