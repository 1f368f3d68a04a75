#include "adam/snapshot.h"

#include <torch/csrc/PyInterpreter.h>
#include <torch/csrc/autograd/python_variable.h>

#include <string>
#include <unordered_map>
#include <utility>

#include "adam/errors.h"
#include "adam/names.h"
#include "adam/parameter.h"

namespace memsave_ext::adam {

namespace py = pybind11;

namespace {

// Reads a group's options, which memsave_ext/adam/fallback/operator.py names as the operator's
// arguments. They can be changed between steps: a wrong one raises as when the optimizer is made.
Group read_group(const py::handle& dict) {
  const py::dict read = registered("options_of")(dict);
  const auto number = [&](const char* name) { return read[name].cast<double>(); };
  const auto is_set = [&](const char* name) { return read[name].cast<bool>(); };
  const auto name = [&](const char* key) { return read[key].cast<std::string>(); };
  Group group;
  group.options = {number("lr"),
                   number("beta1"),
                   number("beta2"),
                   number("eps"),
                   number("weight_decay"),
                   is_set("decoupled_weight_decay"),
                   is_set("nesterov"),
                   is_set("maximize"),
                   named<Rule>(kRuleRows, name("rule"), "there is no rule"),
                   static_cast<uint64_t>(read["seed"].cast<int64_t>())};
  if (!read["tensor_lr"].is_none()) group.lr = THPVariable_Unpack(read["tensor_lr"].ptr());
  if (!read["max_grad_norm"].is_none()) group.max_grad_norm = number("max_grad_norm");
  const std::string bf16 = read["bf16"].is_none() ? "" : name("bf16");
  group.bf16 = named<ParamFormat>(kParamRows, bf16, "there is no bf16");
  group.state_dtype =
      named<StateFormat>(kStateRows, name("state_format"), "there is no state_dtype");
  py::object place = dict.attr("get")("states_on");
  if (!place.is_none()) {
    group.smallest_elsewhere = place.attr("smallest").cast<int64_t>();
    group.place = std::make_shared<c10::SafePyObject>(place.release().ptr(), getPyInterpreter());
  }
  return group;
}

// Looks up the states of parameters by address: a tensor's __hash__ is a call into Python.
class StateOf {
 public:
  explicit StateOf(py::object states) : states_(std::move(states)) {}

  PyObject* operator()(PyObject* param) {  // borrowed; null where it has none
    // Most often the states are in the order of the parameters.
    PyObject *key, *value;
    Py_ssize_t position = position_;
    if (PyDict_Next(states_.ptr(), &position, &key, &value) && key == param) {
      position_ = position;
      return value;
    }
    if (all_.empty()) {
      for (position = 0; PyDict_Next(states_.ptr(), &position, &key, &value);) {
        all_.emplace(key, value);
      }
    }
    const auto found = all_.find(param);
    return found == all_.end() ? nullptr : found->second;
  }

 private:
  const py::object states_;
  Py_ssize_t position_ = 0;
  std::unordered_map<PyObject*, PyObject*> all_;
};

}  // namespace

Snapshot read_optimizer(const py::handle& optimizer, Algorithm algorithm) {
  Snapshot snapshot;
  const bool reads = algorithm != Algorithm::kOwn;  // an own step() reads options and states itself
  StateOf state_of(optimizer.attr("state"));
  for (const py::handle group : py::list(optimizer.attr("param_groups"))) {
    Group& options = snapshot.groups.emplace_back(reads ? read_group(group) : Group{});
    options.algorithm = algorithm;
    if (reads) {
      options.dict = std::make_shared<c10::SafePyObject>(
          py::reinterpret_borrow<py::object>(group).release().ptr(), getPyInterpreter());
    }
    options.position = static_cast<uint32_t>(snapshot.groups.size() - 1);
    for (const py::handle param : py::list(group["params"])) {
      auto& parameter = snapshot.parameters.emplace_back();
      parameter.tensor = THPVariable_Unpack(param.ptr());
      parameter.local = local_tensor(param);
      parameter.group = &options;
      parameter.position = static_cast<uint32_t>(snapshot.parameters.size() - 1);
      PyObject* const state = reads ? state_of(param.ptr()) : nullptr;
      if (state != nullptr) read_state(state, parameter.state);
    }
  }
  return snapshot;
}

void publish_states(const std::vector<FreshState>& states, const py::handle& optimizer) {
  if (states.empty()) return;
  py::list made;
  for (const auto& [tensor, state] : states) {
    made.append(py::make_tuple(wrapped(tensor), py::handle(state->ptr(getPyInterpreter()))));
  }
  registered("publish_states")(optimizer, made);
}

}  // namespace memsave_ext::adam
