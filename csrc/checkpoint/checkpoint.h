// memsave_ext.checkpoint: checkpointing that keeps the graph and replaces what it saves.
#pragma once

#include <pybind11/pybind11.h>

namespace memsave_ext {

// Runs `function(*arguments, **kwargs)`, kwargs a dict or None, as a region that recomputes with
// `recompute_function`. `on_error` is None, or adds to the message of a CheckpointError.
pybind11::object checkpoint_region(pybind11::object function, pybind11::object recompute_function,
                                   pybind11::tuple arguments, pybind11::object kwargs,
                                   bool preserve_rng_state, bool early_stop, bool check_determinism,
                                   pybind11::object on_error);

}  // namespace memsave_ext
