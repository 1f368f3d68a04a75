// What a step that follows a plan has to do, in the order in which it comes.
#pragma once

#include <cstdint>
#include <vector>

#include "plan/trace.h"

namespace memsave_ext::plan {

// Operators of which nothing is recomputed and tensors that stay with autograd pass: a step that
// went before by the same plan has written down what there is to know of them.
struct Script {
  // How many operators had begun, and tensors were saved, where it begins: until a step is
  // recognized, all that comes is recorded and packed.
  int32_t first_operator = 0, first_save = 0;
  std::vector<uint8_t> recorded;  // by operator: whether it is recorded
  std::vector<int32_t> packed;    // by saved tensor: its content where it is packed; -1: it passes
  bool all_pass = true;           // all operators, as everything is kept
  struct Passing {
    int32_t content;
    int32_t save;  // the first of its saved tensors
  };
  std::vector<Passing> passing;  // contents of which no tensor is packed
};

// Packed are dropped contents, and kept ones that are made by an operator that is recorded: routes
// end there. Besides, the saved tensors that backward opens first and lets go last, by which a step
// knows when its backward begins and ends. The trace is that of a whole step.
Script script_of(const Trace& trace, const std::vector<Decision>& decisions, int32_t first_operator,
                 int32_t first_save);

}  // namespace memsave_ext::plan
