#include "remat/lived.h"

#include <c10/util/flat_hash_map.h>
#include <torch/csrc/autograd/python_variable.h>

namespace memsave_ext::remat {
namespace {

class Walk {
 public:
  explicit Walk(const pybind11::list& states) : states_(states) {}

  // These return false where there is something else than they know.
  bool module(PyObject* part) {
    if (!parts_.insert(part).second) return true;
    PyObject** dict = _PyObject_GetDictPtr(part);
    if (dict == nullptr || *dict == nullptr || PyDict_GetItem(*dict, former_.ptr()) != nullptr) {
      return false;
    }
    const auto each = [&](const pybind11::str& name, const auto& visit) {
      PyObject* values = PyDict_GetItem(*dict, name.ptr());
      if (values == nullptr || !PyDict_Check(values)) return false;
      PyObject *key = nullptr, *value = nullptr;
      Py_ssize_t position = 0;
      while (PyDict_Next(values, &position, &key, &value)) {
        if (value != Py_None && !visit(value)) return false;
      }
      return true;
    };
    return each(parameters_, [&](PyObject* value) { return parameter(value); }) &&
           each(buffers_, [&](PyObject* value) { return tensor(value); }) &&
           each(modules_, [&](PyObject* value) { return module(value); });
  }

  Lived take() { return std::move(found_); }

 private:
  bool tensor(PyObject* value) {
    if (!THPVariable_CheckExact(value)) return false;
    found_.tensors.push_back(THPVariable_Unpack(value));
    return true;
  }

  bool parameter(PyObject* value) {
    if (!seen_.insert(value).second) return true;
    if (!tensor(value)) return false;
    const at::Tensor& param = found_.tensors.back();
    // Of others torch warns where their .grad is read: backward leaves none in them.
    if (param.is_leaf() || param.retains_grad()) {
      const at::Tensor& grad = param.grad();
      if (grad.defined()) {
        if (grad.key_set().has_any(c10::python_ks)) return false;
        found_.gradients.push_back(grad);
      } else if (param.requires_grad()) {
        found_.missing += static_cast<int64_t>(param.nbytes());
      }
    }
    for (const auto& of : states_) {
      PyObject* state = PyDict_GetItem(of.ptr(), value);
      if (state == nullptr) continue;
      if (!PyDict_CheckExact(state)) return false;
      PyObject *key = nullptr, *item = nullptr;
      Py_ssize_t position = 0;
      while (PyDict_Next(state, &position, &key, &item)) {
        const bool holds_none = item == Py_None || PyLong_Check(item) || PyFloat_Check(item);
        if (!holds_none && !tensor(item)) return false;
      }
    }
    return true;
  }

  const pybind11::list& states_;
  const pybind11::str former_{"_former_parameters"}, parameters_{"_parameters"},
      buffers_{"_buffers"}, modules_{"_modules"};
  Lived found_;
  ska::flat_hash_set<const PyObject*> parts_, seen_;
};

}  // namespace

std::optional<Lived> lived_in(pybind11::handle model, const pybind11::list& states) {
  for (const auto& state : states) {
    if (!PyDict_Check(state.ptr())) return std::nullopt;
  }
  Walk walk(states);
  if (!walk.module(model.ptr())) return std::nullopt;
  return walk.take();
}

}  // namespace memsave_ext::remat
