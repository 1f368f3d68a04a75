// Calls of the operators that step and measure. They go through the dispatcher where that makes a
// difference, so that profilers see them, and fake and meta tensors work.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/ArrayRef.h>

#include "adam/factors.h"
#include "adam/parameter.h"

namespace memsave_ext::adam {

// Whether the dispatcher would only call kernels for the parameter's tensors: there is no mode,
// subclass or lazy view.
bool needs_only_kernels(const Parameter& parameter);

// Advances the step counts and steps. The parameters are prepared and lie on one device.
void step_all(c10::ArrayRef<Parameter*> parameters, const Scaling& scaling);

// Returns the sum of squares of all gradients, a double scalar on their device.
at::Tensor sum_of_squares(c10::ArrayRef<at::Tensor> grads);

}  // namespace memsave_ext::adam
