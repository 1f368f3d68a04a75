// An optimizer's param_groups and state, as they are at one moment.
#pragma once

#include <pybind11/pybind11.h>

#include <deque>
#include <memory>
#include <vector>

#include "adam/step.h"

namespace memsave_ext::adam {

struct Entry;

struct Parameter {
  at::Tensor tensor;
  at::Tensor local;  // what is stepped: of a DTensor the part that is here, else the parameter
  State state;       // likewise; undefined where it has none yet
  const Group* group;
  uint32_t position;             // in the optimizer
  std::shared_ptr<Entry> entry;  // of its hook; null without
  bool fresh = false;            // the state is not in the optimizer's yet
};

// The step of a parameter with a gradient. Makes its state where it has none. Throws where the step
// cannot be made; nothing is changed then.
Update checked_update(Parameter& parameter, at::Tensor grad, Phase phase);

// Undoes that a state was made, for a parameter that is not stepped after all.
void forget_fresh_state(Parameter& parameter);

struct Snapshot {
  uint64_t number = 0;  // each that is used has its own
  std::deque<Group> groups;
  std::vector<Parameter> parameters;
  at::Tensor loss_scale;  // of the optimizer's GradScaler; undefined without one

  // Those whose states were made since; from now on they count as the optimizer's.
  std::vector<const Parameter*> take_fresh();
};

// The scale of the optimizer's GradScaler; undefined without one. Needs the GIL.
at::Tensor read_loss_scale(const pybind11::handle& optimizer);

// Needs the GIL.
Snapshot read_optimizer(const pybind11::handle& optimizer);

// Puts these parameters' states into the optimizer's. Needs the GIL.
void publish_states(const std::vector<const Parameter*>& parameters,
                    const pybind11::handle& optimizer);

}  // namespace memsave_ext::adam
