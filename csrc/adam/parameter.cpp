#include "adam/parameter.h"

#include <torch/csrc/PyInterpreter.h>
#include <torch/csrc/autograd/python_variable.h>

#include <utility>

#include "adam/checks.h"
#include "adam/given.h"
#include "adam/snapshot.h"

namespace memsave_ext::adam {

namespace py = pybind11;

std::string name_of(const Entry& entry, const at::Tensor& param) {
  return c10::str("parameter ", entry.position, " of the optimizer (shape ", param.sizes(), ")");
}

namespace {

// Has Python make a state, once in a parameter's life. The caller may hold the stepper's mutex.
void make_state(Parameter& parameter, const at::Tensor& grad, StepPhase phase) {
  const py::gil_scoped_acquire gil;
  const auto param = py::reinterpret_steal<py::object>(THPVariable_Wrap(parameter.tensor));
  const py::handle group = parameter.group->dict->ptr(getPyInterpreter());
  py::object dict = given("make_state")(param, group);
  State made;
  read_state(dict.ptr(), made);
  const at::Tensor& low_part = parameter.state.param_low_part;
  if (low_part.defined()) made.param_low_part = low_part;  // publish_states() keeps it, too
  check_step(parameter.local, grad, made, *parameter.group, phase);
  parameter.state = std::move(made);
  parameter.fresh = std::make_shared<c10::SafePyObject>(dict.release().ptr(), getPyInterpreter());
}

}  // namespace

void prepare(Parameter& parameter, at::Tensor grad, StepPhase phase) {
  if (parameter.group->algorithm == Algorithm::kOwn) {
    // Its own step() makes the state and checks.
  } else if (is_complete(parameter.local, parameter.state, *parameter.group)) {
    check_step(parameter.local, grad, parameter.state, *parameter.group, phase);
  } else {
    make_state(parameter, grad, phase);
  }
  parameter.grad = std::move(grad);
  parameter.phase = phase;
}

void forget_prepared(Parameter& parameter) {
  parameter.grad.reset();
  if (!std::exchange(parameter.fresh, nullptr)) return;
  parameter.state = State{};
}

}  // namespace memsave_ext::adam
