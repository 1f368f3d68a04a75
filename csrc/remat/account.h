// What the memory of a step is made of where it is highest, and where a step needed another peak
// than its plan foresaw.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "plan/move.h"
#include "plan/plan.h"

namespace memsave_ext::remat {

// A point of a step: in forward the operator that has run last, in backward the one whose result
// was opened last.
struct Place {
  bool in_forward = false;
  int32_t call = -1;  // of the trace; -1: none
};

// Where a step under a plan needs the most memory.
struct Limit {
  Place place;
  int64_t others = 0;      // bytes that no plan changes: what lived before, gradients, what runs
  int64_t made = 0;        // those of them that live on after the step: gradients, mostly
  int64_t on_context = 0;  // of others: what autograd.Functions keep and have not saved
  int64_t held = 0;        // bytes of contents that are kept or were recomputed
  std::vector<int32_t> kept, recomputed;  // contents; others of them are on the way to these
};
Limit limit_of(const plan::Trace& trace, const plan::Plan& plan);

// The logits of a loss over classes, and what a log_softmax makes of them.
std::vector<int32_t> logits_of(const plan::Trace& trace);

// The most bytes between two moments that a step under a plan is foreseen to need, by the later
// one. `schedule`: of its copies; null where it moves nothing.
std::vector<int64_t> foreseen(const plan::Trace& trace,
                              const std::vector<plan::Decision>& decisions,
                              const plan::Schedule* schedule);

// A step whose peak was more than a hundredth off.
struct Deviation {
  std::optional<Place> place;          // where it was most; none of a step that went by a script
  const Operator* op = nullptr;        // of its call
  int64_t measured = 0, foreseen = 0;  // the most bytes there
};
// `measured`: as foreseen() has it, of the step that `trace` is of. `known`: the trace that its
// plan was made of.
Deviation deviation_of(const plan::Trace& trace, const plan::Trace& known,
                       const std::vector<plan::Decision>& decisions, const plan::Schedule* schedule,
                       const std::vector<int64_t>& measured);

}  // namespace memsave_ext::remat
