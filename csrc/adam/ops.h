// Adam's operators, as C++ calls them. Schemas: memsave_ext/adam/operators.py.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/ArrayRef.h>
#include <torch/library.h>

#include <string>
#include <tuple>
#include <vector>

#include "adam/items.h"
#include "adam/parameter.h"

namespace memsave_ext::adam {

// Whether the dispatcher would only call kernels for the parameter's tensors: there is no mode,
// subclass or lazy view.
bool needs_only_kernels(const Parameter& parameter);

// Advances the step counts and steps. The parameters are prepared and lie on one device. Calls the
// operator where the dispatcher does more than to call its kernel, so that profilers see steps, and
// fake and meta tensors work; else calls the kernel.
void adam_step(c10::ArrayRef<Parameter*> parameters, const Scaling& scaling);

// Returns the sum of squares of all gradients, a double scalar on their device.
at::Tensor adam_sum_of_squares(c10::ArrayRef<at::Tensor> grads);

// What kernels are compiled for: dtype, bf16=, names of states and rule.
using Combinations = std::vector<std::tuple<at::ScalarType, std::string, std::string, std::string>>;
Combinations combinations();

void register_operators(torch::Library& library);

}  // namespace memsave_ext::adam
