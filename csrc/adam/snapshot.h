// An optimizer's param_groups and state, as they are at one moment.
#pragma once

#include <c10/core/SafePyObject.h>
#include <pybind11/pybind11.h>

#include <deque>
#include <optional>
#include <vector>

#include "adam/parameter.h"

namespace memsave_ext::adam {

struct Snapshot {
  uint64_t number = 0;  // set by Backwards::use_snapshot(), unique; 0 before
  std::deque<Group> groups;
  std::deque<Parameter> parameters;
  // An optimizer that steps by its own step() is not to go meanwhile: what is left could not be
  // stepped. Empty for others.
  std::optional<c10::SafePyObject> owner;
  at::Tensor grad_scale;  // of the optimizer's GradScaler; undefined without one

  // Returns the parameters whose states were made since the snapshot, or since the last call.
  std::vector<const Parameter*> take_fresh();
};

// Reads the optimizer's param_groups and, where they are of `algorithm`, its state. Needs the GIL.
Snapshot read_optimizer(const pybind11::handle& optimizer, Algorithm algorithm);

// Puts these parameters' states into the optimizer's state. Needs the GIL.
void publish_states(const std::vector<const Parameter*>& parameters,
                    const pybind11::handle& optimizer);

}  // namespace memsave_ext::adam
