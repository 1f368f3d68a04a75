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
  at::Tensor tensor;  // as the optimizer has it
  at::Tensor local;   // what is stepped: of a DTensor the part that is here, else the parameter
  State state;        // likewise; undefined where it has none yet
  const Group* group = nullptr;
  uint32_t position = 0;         // in the optimizer
  std::shared_ptr<Entry> entry;  // of its hook; null without
  bool fresh = false;            // the state is not in the optimizer's yet

  // What is done next; see prepare().
  at::Tensor grad;  // like `local`; undefined for zeros, where folded gradients are closed
  Phase phase = Phase::kWhole;
};

// Readies a parameter for a step with this gradient. Makes its state where it has none. Throws
// where the step cannot be made; nothing is changed then.
void prepare(Parameter& parameter, at::Tensor grad, Phase phase);

// Undoes prepare(), for a parameter that is not stepped after all.
void forget_prepared(Parameter& parameter);

}  // namespace memsave_ext::adam
