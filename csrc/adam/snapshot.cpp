#include "adam/snapshot.h"

#include <torch/csrc/autograd/python_variable.h>

#include <unordered_map>
#include <utility>

#include "adam/dtensor.h"

namespace memsave_ext::adam {

namespace py = pybind11;

namespace {

// Interned, so that a look-up neither makes nor hashes a string.
struct Keys {
  static PyObject* intern(const char* name) { return PyUnicode_InternFromString(name); }
  PyObject* step = intern("step");
  PyObject* exp_avg = intern("exp_avg");
  PyObject* exp_avg_sq = intern("exp_avg_sq");
  PyObject* max_exp_avg_sq = intern("max_exp_avg_sq");
};

PyObject* find(PyObject* dict, PyObject* key) {  // borrowed
  PyObject* value = PyDict_GetItemWithError(dict, key);
  if (value == nullptr && PyErr_Occurred()) throw py::error_already_set();
  return value;
}

py::object get(const py::handle& dict, const char* key) {
  PyObject* value = PyDict_GetItemString(dict.ptr(), key);
  return value ? py::reinterpret_borrow<py::object>(value) : py::none();
}

bool is_true(const py::object& value) { return PyObject_IsTrue(value.ptr()) == 1; }

double number(const py::object& value) {
  if (THPVariable_Check(value.ptr())) {
    return THPVariable_Unpack(value.ptr()).item<double>();
  }
  return value.cast<double>();
}

at::Tensor tensor(const py::object& value) {
  return THPVariable_Check(value.ptr()) ? THPVariable_Unpack(value.ptr()) : at::Tensor();
}

Group read_group(const py::handle& dict) {
  Group group;
  const py::tuple betas = get(dict, "betas");
  const py::object lr = get(dict, "lr");
  if (const at::Tensor on_device = tensor(lr); on_device.defined() && !on_device.is_cpu()) {
    group.lr = on_device.to(at::kFloat);
  } else {
    group.options.lr = number(lr);
  }
  group.options.beta1 = number(betas[0]);
  group.options.beta2 = number(betas[1]);
  group.options.eps = number(get(dict, "eps"));
  group.options.weight_decay = number(get(dict, "weight_decay"));
  group.options.decoupled_weight_decay = is_true(get(dict, "decoupled_weight_decay"));
  group.options.amsgrad = is_true(get(dict, "amsgrad"));
  group.options.maximize = is_true(get(dict, "maximize"));
  group.step_on_device = is_true(get(dict, "capturable")) || is_true(get(dict, "fused"));
  return group;
}

State read_state(PyObject* dict) {
  static const Keys keys;
  const auto tensor_at = [&](PyObject* key) {
    PyObject* value = find(dict, key);
    return value && THPVariable_Check(value) ? local_tensor(value) : at::Tensor();
  };
  return {tensor_at(keys.step), tensor_at(keys.exp_avg), tensor_at(keys.exp_avg_sq),
          tensor_at(keys.max_exp_avg_sq)};
}

}  // namespace

Snapshot read_optimizer(const py::handle& optimizer) {
  Snapshot snapshot;
  // By address: a tensor's __hash__ is a call into Python.
  const py::object states = optimizer.attr("state");
  std::unordered_map<PyObject*, PyObject*> state_of;
  PyObject *key, *value;
  for (Py_ssize_t position = 0; PyDict_Next(states.ptr(), &position, &key, &value);) {
    state_of.emplace(key, value);
  }
  for (const py::handle group : py::list(optimizer.attr("param_groups"))) {
    const Group* options = &snapshot.groups.emplace_back(read_group(group));
    for (const py::handle param : py::list(get(group, "params"))) {
      auto& parameter = snapshot.parameters.emplace_back();
      parameter.tensor = THPVariable_Unpack(param.ptr());
      parameter.local = local_tensor(param);
      parameter.group = options;
      const auto state = state_of.find(param.ptr());
      if (state != state_of.end() && PyDict_Size(state->second) > 0) {
        parameter.state = read_state(state->second);
      }
    }
  }
  return snapshot;
}

Update checked_update(Parameter& parameter, at::Tensor grad) {
  Update update{parameter.local, std::move(grad), parameter.state, parameter.group};
  const bool fresh = !update.state.defined();
  if (fresh) update.state = make_state(update.param, *update.group);
  check_update(update);
  if (fresh) {
    parameter.state = update.state;
    parameter.fresh = true;
  }
  return update;
}

void forget_fresh_state(Parameter& parameter) {
  if (!parameter.fresh) return;
  parameter.state = State{};
  parameter.fresh = false;
}

std::vector<const Parameter*> Snapshot::take_fresh() {
  std::vector<const Parameter*> taken;
  for (auto& parameter : parameters) {
    if (std::exchange(parameter.fresh, false)) taken.push_back(&parameter);
  }
  return taken;
}

void publish_states(const std::vector<const Parameter*>& parameters, const py::handle& optimizer) {
  if (parameters.empty()) return;
  const py::object states = optimizer.attr("state");
  for (const Parameter* parameter : parameters) {
    const auto param = py::reinterpret_steal<py::object>(THPVariable_Wrap(parameter->tensor));
    py::dict state;
    state["step"] = py::reinterpret_steal<py::object>(THPVariable_Wrap(parameter->state.step));
    const auto put = [&](const char* name, const at::Tensor& value) {
      if (value.defined()) state[name] = as_placed(param, value);
    };
    put("exp_avg", parameter->state.exp_avg);
    put("exp_avg_sq", parameter->state.exp_avg_sq);
    put("max_exp_avg_sq", parameter->state.max_exp_avg_sq);
    if (PyObject_SetItem(states.ptr(), param.ptr(), state.ptr()) < 0) {
      throw py::error_already_set();
    }
  }
}

}  // namespace memsave_ext::adam
