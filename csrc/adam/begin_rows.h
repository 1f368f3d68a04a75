// Steps a parameter from the node of the graph that computes its gradient, rows by rows.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>

namespace memsave_ext::adam {

// For the autograd node that this thread runs: begins a step of the parameter whose gradient is the
// node's for its `input`, a StepInRows. Returns a text where that gradient has to be whole: why.
// Needs the GIL.
pybind11::object begin_rows(int64_t input);

}  // namespace memsave_ext::adam
