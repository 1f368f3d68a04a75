// The second derivative, rarely asked for: the gradients again in torch's own operators, which
// autograd can differentiate as often as it likes.
#pragma once

#include <torch/csrc/autograd/variable.h>

#include "batch_norm/arguments.h"

namespace memsave_ext::batch_norm {

// `of` are the arguments of batch_norm_backward, `grads` belong to the gradients of input,
// residual, weight and bias. Returns those of grad, input, residual, weight and bias.
torch::autograd::variable_list double_backward(const Arguments& of,
                                               const torch::autograd::variable_list& grads);

}  // namespace memsave_ext::batch_norm
