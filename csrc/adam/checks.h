// What is checked before a step is made, so that nothing is changed where it cannot be.
#pragma once

#include <ATen/core/Tensor.h>

#include "adam/state.h"

namespace memsave_ext::adam {

// Throws where this build has no kernels for a device.
void check_device(c10::Device device);

void check_dense(const at::Tensor& grad);

// Throws where a parameter cannot be stepped with this gradient, undefined for zeros, and state.
void check_step(const at::Tensor& param, const at::Tensor& grad, const State& state,
                const Group& group, Phase phase);

}  // namespace memsave_ext::adam
