// The second derivative, rarely asked for: the gradients again in torch's own operators, which
// autograd can differentiate as often as it likes.
#pragma once

#include <torch/csrc/autograd/variable.h>

#include <array>
#include <string_view>

#include "batch_norm/call.h"

namespace memsave_ext::batch_norm {

// What batch_norm_backward is a function of.
struct BackwardInputs {
  at::Tensor grad, input;
  MaybeTensor residual, weight, bias;
};

// `grads` belong to the gradients of input, residual, weight and bias; returns those of
// BackwardInputs, in its order.
torch::autograd::variable_list double_backward(const BackwardInputs& inputs,
                                               const at::Tensor& statistics, bool training,
                                               double eps, std::string_view activation,
                                               double negative_slope,
                                               const torch::autograd::variable_list& grads);

}  // namespace memsave_ext::batch_norm
