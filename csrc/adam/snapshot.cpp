#include "adam/snapshot.h"

#include <torch/csrc/PyInterpreter.h>
#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <array>
#include <exception>
#include <iterator>
#include <string>
#include <unordered_map>
#include <utility>

#include "adam/errors.h"
#include "adam/format_names.h"
#include "adam/parameter.h"

namespace memsave_ext::adam {

namespace py = pybind11;

namespace {

// Returns the names of kStateNames, interned: a look-up neither makes, hashes nor compares strings.
const std::array<PyObject*, std::size(kStateNames)>& keys() {
  static const auto of_names = [] {
    std::array<PyObject*, std::size(kStateNames)> made{};
    for (size_t i = 0; i < made.size(); ++i) {
      made[i] = PyUnicode_InternFromString(kStateNames[i].name);
    }
    return made;
  }();
  return of_names;
}

py::object get(const py::handle& dict, const char* key) {
  PyObject* value = PyDict_GetItemString(dict.ptr(), key);
  return value ? py::reinterpret_borrow<py::object>(value) : py::none();
}

bool is_true(const py::object& value) {
  // A text such as "no" would be true.
  if (PyUnicode_Check(value.ptr())) throw py::type_error("a text");
  return PyObject_IsTrue(value.ptr()) == 1;
}

double number(const py::object& value) {
  if (THPVariable_Check(value.ptr())) {
    return THPVariable_Unpack(value.ptr()).item<double>();
  }
  return value.cast<double>();
}

at::Tensor tensor(const py::object& value) {
  return THPVariable_Check(value.ptr()) ? THPVariable_Unpack(value.ptr()) : at::Tensor();
}

// Reads the options that a group may lack; where it does, the defaults stay.
void read_modes(const py::handle& dict, Group& group) {
  group.bf16 = param_format_named(get(dict, "bf16"));
  group.state_dtype = state_format_named(get(dict, "state_dtype"));
  if (const py::object seed = get(dict, "seed"); !seed.is_none()) {
    group.options.seed = seed.cast<uint64_t>();
  }
  if (const py::object norm = get(dict, "max_grad_norm"); !norm.is_none()) {
    group.max_grad_norm = number(norm);
    if (!(group.max_grad_norm > 0)) throw py::value_error("max_grad_norm");
  }
}

void read_betas(const py::handle& dict, Options& options) {
  const py::tuple betas = get(dict, "betas");
  if (betas.size() != 2) throw py::type_error("betas");
  options.beta1 = number(betas[0]);
  options.beta2 = number(betas[1]);
}

// Reads what only some rules have. Which rule it is follows from the options that a group has, as
// in memsave_ext/adam/rules.py.
void read_rule(const py::handle& dict, Options& options) {
  if (PyDict_GetItemString(dict.ptr(), "amsgrad") != nullptr) {
    read_betas(dict, options);
    options.eps = number(get(dict, "eps"));
    options.decoupled_weight_decay = is_true(get(dict, "decoupled_weight_decay"));
    options.rule = is_true(get(dict, "amsgrad")) ? Rule::kAmsgrad : Rule::kAdam;
  } else if (PyDict_GetItemString(dict.ptr(), "dampening") != nullptr) {
    options.beta1 = number(get(dict, "momentum"));
    options.beta2 = number(get(dict, "dampening"));
    options.nesterov = is_true(get(dict, "nesterov"));
    options.rule = options.beta1 != 0 ? Rule::kMomentum : Rule::kSgd;
  } else {
    read_betas(dict, options);
    options.rule = Rule::kLion;
  }
}

Group read_checked_group(const py::handle& dict) {
  Group group;
  const py::object lr = get(dict, "lr");
  if (const at::Tensor on_device = tensor(lr); on_device.defined() && !on_device.is_cpu()) {
    group.lr = on_device.to(at::kFloat);
  } else {
    group.options.lr = number(lr);
  }
  read_rule(dict, group.options);
  group.options.weight_decay = number(get(dict, "weight_decay"));
  group.options.maximize = is_true(get(dict, "maximize"));
  // What decides where a new state's step is; a wrong one is to raise as soon as it is set.
  for (const char* name : {"capturable", "fused"}) is_true(get(dict, name));
  read_modes(dict, group);
  return group;
}

// Options can be changed between steps. One that cannot be read raises the same error as when the
// optimizer is made.
Group read_group(const py::handle& dict) {
  try {
    return read_checked_group(dict);
  } catch (const std::exception&) {
    registered("check_options")(dict);
    throw;
  }
}

// Returns the index of a key in keys(), or their number where it is not there. Most often it is
// `guess`.
size_t place_of(PyObject* key, size_t guess) {
  const auto& names = keys();
  if (guess < names.size() && key == names[guess]) return guess;
  return std::find_if(names.begin(), names.end(),
                      [&](PyObject* name) {
                        return key == name ||
                               (PyUnicode_Check(key) && PyUnicode_Compare(key, name) == 0);
                      }) -
         names.begin();
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

void read_state(PyObject* dict, State& state) {
  PyObject *key, *value;
  size_t next = 0;
  for (Py_ssize_t position = 0; PyDict_Next(dict, &position, &key, &value);) {
    const size_t place = place_of(key, next);
    if (place == keys().size() || !THPVariable_Check(value)) continue;
    state.*kStateNames[place].tensor = local_tensor(value);
    next = place + 1;
  }
}

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
    for (const py::handle param : py::list(get(group, "params"))) {
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
