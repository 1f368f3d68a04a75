#include "adam/parameter.h"

#include <utility>

#include "adam/checks.h"

namespace memsave_ext::adam {

std::string name_of(const Entry& entry, const at::Tensor& param) {
  return c10::str("parameter ", entry.position, " of the optimizer (shape ", param.sizes(), ")");
}

void prepare(Parameter& parameter, at::Tensor grad, StepPhase phase) {
  if (parameter.group->algorithm == Algorithm::kOwn) {
    // Its own step() makes the state and checks.
  } else if (parameter.state.defined()) {
    check_step(parameter.local, grad, parameter.state, *parameter.group, phase);
  } else {
    State made = make_state(parameter.local, parameter.tensor, *parameter.group);
    check_step(parameter.local, grad, made, *parameter.group, phase);
    parameter.state = std::move(made);
    parameter.fresh = true;
  }
  parameter.grad = std::move(grad);
  parameter.phase = phase;
}

void forget_prepared(Parameter& parameter) {
  parameter.grad.reset();
  if (!parameter.fresh) return;
  parameter.state = State{};
  parameter.fresh = false;
}

}  // namespace memsave_ext::adam
