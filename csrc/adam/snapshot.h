// An optimizer's param_groups and state, as they are at one moment.
#pragma once

#include <pybind11/pybind11.h>

#include <deque>
#include <vector>

#include "adam/step.h"

namespace memsave_ext::adam {

struct Parameter {
  at::Tensor tensor;
  State state;  // undefined where it has none yet
  const Group* group;
  bool fresh = false;  // the state is not in the optimizer's yet
};

// The step of a parameter that has a gradient. Makes its state where it has none. Throws where the
// step cannot be made; nothing is changed then.
Update checked_update(Parameter& parameter);

// Undoes that a state was made, for a parameter that is not stepped after all.
void forget_fresh_state(Parameter& parameter);

struct Snapshot {
  std::deque<Group> groups;
  std::vector<Parameter> parameters;
};

// Needs the GIL.
Snapshot read_optimizer(const pybind11::handle& optimizer);

// Puts the states made since into the optimizer's. Needs the GIL.
void publish_states(Snapshot& snapshot, const pybind11::handle& optimizer);

}  // namespace memsave_ext::adam
