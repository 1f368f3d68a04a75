// Checks that run before a step, so that a step that cannot be made changes nothing.
#pragma once

#include <ATen/core/Tensor.h>

#include "adam/state.h"

namespace memsave_ext::adam {

// Throws where this build has no kernels for a device.
void check_device(c10::Device device);

// Throws where the gradient is not strided, for example sparse. rule: whose error it is.
void check_dense(const at::Tensor& grad, Rule rule = Rule::kAdam);

// Throws where the parameter cannot be stepped with this gradient and state. An undefined `grad`
// stands for zeros.
void check_step(const at::Tensor& param, const at::Tensor& grad, const State& state,
                const Group& group, StepPhase phase);

}  // namespace memsave_ext::adam
