#include "adam/parameter.h"

#include <torch/csrc/PyInterpreter.h>

#include <utility>

#include "adam/errors.h"
#include "adam/state.h"

namespace memsave_ext::adam {

namespace py = pybind11;

std::string name_of(const Entry& entry, const at::Tensor& param) {
  return c10::str("parameter ", entry.position, " of the optimizer (shape ", param.sizes(), ")");
}

Sharding sharding_of(const Parameter& parameter) {
  Entry* const entry = parameter.entry.get();
  if (entry != nullptr && entry->sharding) return *entry->sharding;
  const py::gil_scoped_acquire gil;
  const py::tuple found = registered("sharding_of")(wrapped(parameter.tensor));
  const Sharding sharding{found[0].cast<int64_t>(), found[1].cast<int64_t>()};
  if (entry != nullptr) entry->sharding = sharding;
  return sharding;
}

void take_fresh(Parameter& parameter, std::vector<FreshState>& taken) {
  if (!parameter.fresh) return;
  taken.push_back({parameter.tensor, std::move(parameter.fresh)});
  parameter.before_fresh = State{};
}

namespace {

// Has Python make a state, once in a parameter's life: one that is not complete can be without a
// momentum buffer, which SGD may begin to ask for. The caller may hold the collector's mutex.
void make_state(Parameter& parameter, const at::Tensor& grad) {
  const py::gil_scoped_acquire gil;
  const Group& group = *parameter.group;
  const py::handle options = group.dict->ptr(getPyInterpreter());
  if (registered("is_complete")(dict_of(parameter.state), options).cast<bool>()) {
    throw_misfit(parameter.local, grad, parameter.state, group);
  }
  py::object dict = registered("make_state")(wrapped(parameter.tensor), options);
  State made;
  read_state(dict.ptr(), made);
  const at::Tensor& low_part = parameter.state.param_low_part;
  if (low_part.defined()) made.param_low_part = low_part;  // publish_states() keeps it, too
  if (!can_step(parameter.local, grad, made, group)) {
    throw_misfit(parameter.local, grad, made, group);
  }
  parameter.before_fresh = std::exchange(parameter.state, std::move(made));
  parameter.fresh = std::make_shared<c10::SafePyObject>(dict.release().ptr(), getPyInterpreter());
}

}  // namespace

void prepare(Parameter& parameter, at::Tensor grad) {
  // An optimizer's own step() makes the state and checks.
  if (parameter.group->algorithm == Algorithm::kRule &&
      !can_step(parameter.local, grad, parameter.state, *parameter.group)) {
    make_state(parameter, grad);
  }
  parameter.grad = std::move(grad);
}

void forget_prepared(Parameter& parameter) {
  parameter.grad.reset();
  if (!std::exchange(parameter.fresh, nullptr)) return;
  parameter.state = std::exchange(parameter.before_fresh, {});
}

}  // namespace memsave_ext::adam
