// The second derivative, which is rarely asked for. Computes the gradients again with torch's own
// operators, which autograd can differentiate any number of times.
#pragma once

#include <torch/csrc/autograd/variable.h>

#include "batch_norm/arguments.h"

namespace memsave_ext::batch_norm {

// Differentiates batch_norm_backward, whose arguments are `of`. `grads` are the gradients of its
// four results. Returns the gradients of grad, input, residual, weight and bias.
torch::autograd::variable_list double_backward(const Arguments& of,
                                               const torch::autograd::variable_list& grads);

}  // namespace memsave_ext::batch_norm
