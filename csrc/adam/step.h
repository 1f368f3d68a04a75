// Steps of parameters as tensors: checked, then handed to a device's kernels.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/ArrayRef.h>

#include "adam/state.h"

namespace memsave_ext::adam {

struct Update {
  at::Tensor param;
  at::Tensor grad;  // undefined for zeros, where folded gradients are closed without another
  State state;
  const Group* group;
  Phase phase = Phase::kWhole;
  uint32_t position = 0;  // of the parameter in the optimizer
};

// What is known of gradients before they are stepped with. Scalars on their device, the factor of
// double and the others of float, all undefined where there is nothing.
struct Scaling {
  at::Tensor loss_scale;  // the gradients are multiples of it
  at::Tensor found;       // set to 1 where one is not finite, which is then not stepped with
  // Of all of them, known already: what they are multiplied by, and whether nothing is to be done.
  at::Tensor factor, skip;
};

// Throws where an update cannot be done; nothing is changed then.
void check_update(const Update& update);

// Advances the step counts, and steps. The updates are checked; the parameters lie on one device.
void step_all(c10::ArrayRef<Update> updates, const Scaling& scaling = {});

// The sum of squares of all gradients, a double scalar on their device.
at::Tensor sum_of_squares(c10::ArrayRef<at::Tensor> grads);

}  // namespace memsave_ext::adam
