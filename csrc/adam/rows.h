// The step of one parameter in parts, each made where its gradient is complete: the whole gradient
// never exists.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "adam/items.h"
#include "adam/kernels.h"
#include "adam/parameter.h"

namespace memsave_ext::adam {

// A part is some rows: a range of the first dimension.
class StepInRows {
 public:
  // Returns why a prepared parameter cannot be stepped so; null where it can be.
  static const char* obstacle(const Parameter& parameter);

  // Advances the step count. What refers to the parameter's earlier values is told that they change
  // from here on.
  explicit StepInRows(const Parameter& parameter);

  // Steps the rows from `first` on with their gradient. Each row must be given once. The first
  // element of a part must be a multiple of kBlock.
  void step(int64_t first, const at::Tensor& grad) const;

 private:
  const at::Tensor param_;
  const State state_;  // keeps the memory that the item points to
  const Group group_;
  Operands operands_;
  Item whole_;
};

}  // namespace memsave_ext::adam
