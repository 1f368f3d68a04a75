// An optimizer's param_groups and state, as they are at one moment.
#pragma once

#include <c10/core/SafePyObject.h>
#include <pybind11/pybind11.h>

#include <deque>
#include <vector>

#include "adam/parameter.h"

namespace memsave_ext::adam {

struct Snapshot {
  uint64_t number = 0;  // set by Backwards::use_snapshot(), unique; 0 before
  std::deque<Group> groups;
  std::deque<Parameter> parameters;
};

// Reads the optimizer's param_groups and, where they are of `algorithm`, its state. Needs the GIL.
Snapshot read_optimizer(const pybind11::handle& optimizer, Algorithm algorithm);

// Puts new states into the optimizer's state. Needs the GIL.
void publish_states(const std::vector<FreshState>& states, const pybind11::handle& optimizer);

}  // namespace memsave_ext::adam
