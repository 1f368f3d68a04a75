// Steps of parameters as tensors: checked, then handed to a device's kernels.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/ArrayRef.h>

#include "adam/kernels.h"

namespace memsave_ext::adam {

// A parameter group's options as they are during one step.
struct Group {
  Options options;
  at::Tensor lr;  // where it lies on the parameters' device; else it is in options
  bool step_on_device = false;
};

// As torch keeps it: step is a scalar, on the CPU or the parameter's device.
struct State {
  at::Tensor step, exp_avg, exp_avg_sq, max_exp_avg_sq;

  bool defined() const { return step.defined(); }
};

// Zeros. In float for types of 16 bits, else in the parameter's.
State make_state(const at::Tensor& param, const Group& group);

struct Update {
  at::Tensor param, grad;
  State state;
  const Group* group;
};

// Throws where an update cannot be done; nothing is changed then.
void check_update(const Update& update);

// Advances the step counts, and steps. The updates are checked; the parameters lie on one device.
void step_all(c10::ArrayRef<Update> updates);

}  // namespace memsave_ext::adam
