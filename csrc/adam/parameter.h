// A parameter on its way from the hook to the operator that steps it.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/ArrayRef.h>

#include <cstdint>
#include <memory>

#include "adam/entry.h"
#include "adam/state.h"

namespace memsave_ext::adam {

struct Parameter {
  at::Tensor tensor;  // as it is in param_groups
  at::Tensor local;   // what is stepped: the local part of a DTensor, else `tensor`
  State state;        // of `local`; undefined where it has none yet
  const Group* group = nullptr;
  uint32_t position = 0;         // among the optimizer's parameters
  std::shared_ptr<Entry> entry;  // of its hook; null without a hook
  // A new state that is not in the optimizer's yet: a dict, of DTensors for a DTensor. Or null.
  std::shared_ptr<c10::SafePyObject> fresh;

  // Set by prepare(), for the next step or fold.
  at::Tensor grad;  // of `local`; undefined: zeros, to close folded gradients without another
  StepPhase phase = StepPhase::kWhole;
};

// Readies a parameter for a step with this gradient, and has its state made where it has none.
// Throws, and changes nothing, where the step cannot be made.
void prepare(Parameter& parameter, at::Tensor grad, StepPhase phase);

// Undoes prepare(), for a parameter that is not stepped after all.
void forget_prepared(Parameter& parameter);

}  // namespace memsave_ext::adam
