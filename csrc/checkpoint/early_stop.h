// Where a recompute may stop: at the last tensor that is needed, unless that is filled later.
#pragma once

#include <pybind11/pybind11.h>
#include <torch/csrc/autograd/function.h>

#include <cstdint>

namespace memsave_ext::checkpoint {

// Operations that save a tensor first and fill it then, without moving its version counter: a
// recompute stopped at that save hands out what was in the memory before (pytorch#193671).
bool fills_after_saving(const torch::autograd::Node& node);

// Whether the node that saved last in the forward, numbered `sequence_nr` - 1, is such an
// operation; `otherwise` where it cannot be found. Looks at the outputs' graph down to that number,
// which is the tail only.
bool last_save_is_filled_later(PyObject* outputs, uint64_t sequence_nr, bool otherwise);

// Stopping is an exception through C++ and Python, some 15 us. It is not worth it where the last
// saved tensors are small and at most two operations follow. By sizes, not by a clock: the same
// program must call its functions the same number of times on every machine.
bool worth_stopping(uint64_t sequence_nr, int64_t numel);

}  // namespace memsave_ext::checkpoint
