#include "remat/lived.h"

#include <c10/util/flat_hash_map.h>
#include <torch/csrc/autograd/python_variable.h>

namespace memsave_ext::remat {
namespace {

// Dictionaries of attributes are looked up by identity where the name is interned, as theirs are.
pybind11::handle interned(const char* name) { return PyUnicode_InternFromString(name); }

class Walk {
 public:
  explicit Walk(const pybind11::list& states) : states_(states) {
    parts_.reserve(parts_before);
    seen_.reserve(seen_before);
  }
  ~Walk() {
    parts_before = parts_.size();
    seen_before = seen_.size();
  }
  Walk(const Walk&) = delete;
  Walk& operator=(const Walk&) = delete;

  // These return false where there is something else than they know.
  bool module(PyObject* part) {
    if (!parts_.insert(part).second) return true;
    PyObject** dict = _PyObject_GetDictPtr(part);
    if (dict == nullptr || *dict == nullptr || PyDict_GetItem(*dict, former_.ptr()) != nullptr) {
      return false;
    }
    const auto each = [&](pybind11::handle name, const auto& visit) {
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

  // For good, as modules are.
  static inline const pybind11::handle former_ = interned("_former_parameters"),
                                       parameters_ = interned("_parameters"),
                                       buffers_ = interned("_buffers"),
                                       modules_ = interned("_modules");
  // How many there were last time: in every step as many, and sets that grow take most of a walk.
  static inline thread_local size_t parts_before = 0, seen_before = 0;

  const pybind11::list& states_;
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
