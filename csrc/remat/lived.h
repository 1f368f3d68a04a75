// What a model and its optimizers have in memory before a step.
#pragma once

#include <ATen/core/Tensor.h>
#include <pybind11/pybind11.h>

#include <cstdint>
#include <optional>
#include <vector>

namespace memsave_ext::remat {

struct Lived {
  std::vector<at::Tensor> tensors;    // parameters, buffers and states, each once
  std::vector<at::Tensor> gradients;  // of parameters
  int64_t missing = 0;                // bytes of gradients that backward will make
};

// The same as LivedBefore of memsave_ext/remat/budget.py finds, in a tenth of the time, which is
// once a step. `states`: those of optimizers, by parameter. Nothing where there is anything but
// plain tensors in dicts: a wrapper subclass, a replica's parameters, or a parameter without a
// shape. The caller holds the GIL.
std::optional<Lived> lived_in(pybind11::handle model, const pybind11::list& states);

}  // namespace memsave_ext::remat
