#include "checkpoint/walk.h"

#include <pybind11/pybind11.h>
#include <torch/csrc/autograd/python_variable.h>

namespace memsave_ext {

namespace py = pybind11;

namespace {

constexpr size_t kDeepest = 64;        // levels
constexpr Py_ssize_t kLargest = 1000;  // elements

// Looked up once. Never freed: they outlive the interpreter's last region.
struct Types {
  PyTypeObject* module;
  PyTypeObject* partial;
  PyObject *parameters, *modules, *dataclass_fields, *func, *args, *keywords;
  PyObject* own_attributes;  // a set of attribute names that every torch module has

  static const Types& get() {
    // With the GIL. A static would be locked while it is made, and whoever waits for that has the
    // GIL, which Python code in the constructor may have given up.
    static const Types* types = nullptr;
    if (types == nullptr) types = new Types();
    return *types;
  }

 private:
  Types() {
    const auto type = [](const char* module, const char* name) {
      py::object found = py::module_::import(module).attr(name);
      return reinterpret_cast<PyTypeObject*>(found.release().ptr());
    };
    module = type("torch.nn", "Module");
    const py::object any_module = py::module_::import("torch.nn").attr("Module")();
    own_attributes = py::set(any_module.attr("__dict__")).release().ptr();
    partial = type("functools", "partial");
    parameters = PyUnicode_InternFromString("_parameters");
    modules = PyUnicode_InternFromString("_modules");
    dataclass_fields = PyUnicode_InternFromString("__dataclass_fields__");
    func = PyUnicode_InternFromString("func");
    args = PyUnicode_InternFromString("args");
    keywords = PyUnicode_InternFromString("keywords");
  }
};

// Whether it can hold no tensor.
bool is_plain(PyObject* object) {
  return object == Py_None || PyLong_Check(object) || PyFloat_Check(object) ||
         PyUnicode_Check(object);
}

bool is_module(PyObject* object) { return PyType_IsSubtype(Py_TYPE(object), Types::get().module); }

bool is_dataclass(PyObject* object) {
  PyObject* mro = Py_TYPE(object)->tp_mro;
  if (mro == nullptr) return false;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(mro); ++i) {
    PyObject* dict = reinterpret_cast<PyTypeObject*>(PyTuple_GET_ITEM(mro, i))->tp_dict;
    if (dict != nullptr && PyDict_Contains(dict, Types::get().dataclass_fields) == 1) return true;
  }
  return false;
}

py::object dict_of(PyObject* object) {
  auto dict = py::reinterpret_steal<py::object>(PyObject_GenericGetDict(object, nullptr));
  if (!dict) PyErr_Clear();  // a class with slots has no dict
  return dict;
}

}  // namespace

void TensorWalk::visit(PyObject* object, PyObject* key, Py_ssize_t index) {
  if (object == nullptr || path_.size() > kDeepest) return;
  path_.push_back({key, index});
  if (THPVariable_Check(object)) {
    visitor_(object);
  } else {
    visit_inside(object);
  }
  path_.pop_back();
}

void TensorWalk::visit_inside(PyObject* object) {
  if (is_plain(object)) return;
  // Once each: objects that lead to each other would be visited along every path.
  if (!visited_.insert(object).second) return;
  const Types& types = Types::get();
  if (PyTuple_Check(object) || PyList_Check(object)) return visit_sequence(object);
  if (PyDict_Check(object)) return visit_dict(object);
  if (is_module(object)) return visit_module(object);
  if (PyFunction_Check(object)) return visit_function(object);
  if (PyMethod_Check(object)) {
    visit(PyMethod_GET_SELF(object));
    return visit(PyMethod_GET_FUNCTION(object));
  }
  if (Py_TYPE(object) == types.partial) {
    for (PyObject* name : {types.func, types.args, types.keywords}) {
      const auto part = py::reinterpret_steal<py::object>(PyObject_GetAttr(object, name));
      if (!part) throw py::error_already_set();
      visit(part.ptr());
    }
    return;
  }
  if (is_dataclass(object)) {
    if (const py::object dict = dict_of(object)) visit_dict(dict.ptr());
  }
}

void TensorWalk::visit_sequence(PyObject* object) {
  if (PySequence_Fast_GET_SIZE(object) > kLargest) return;
  for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(object); ++i) {
    visit(PySequence_Fast_GET_ITEM(object, i), nullptr, i);
  }
}

void TensorWalk::visit_dict(PyObject* dict) {
  if (PyDict_GET_SIZE(dict) > kLargest) return;
  PyObject *key, *value;
  Py_ssize_t position = 0;
  while (PyDict_Next(dict, &position, &key, &value)) visit(value, key);
}

void TensorWalk::visit_module(PyObject* module) {
  const py::object dict = dict_of(module);
  if (!dict) return;
  for (PyObject* name : {Types::get().parameters, Types::get().modules}) {
    PyObject* members = PyDict_GetItemWithError(dict.ptr(), name);
    if (members != nullptr && PyDict_Check(members)) visit_dict(members);
  }
  PyObject *name, *value;
  Py_ssize_t position = 0;
  while (PyDict_Next(dict.ptr(), &position, &name, &value)) {
    if (!is_plain(value) && PySet_Contains(Types::get().own_attributes, name) == 0) {
      visit(value, name);
    }
  }
}

void TensorWalk::visit_function(PyObject* function) {
  auto* code = reinterpret_cast<PyCodeObject*>(PyFunction_GET_CODE(function));
  if (PyObject* cells = PyFunction_GET_CLOSURE(function)) {
    const auto names = py::reinterpret_steal<py::object>(
        PyObject_GetAttrString(reinterpret_cast<PyObject*>(code), "co_freevars"));
    if (!names) throw py::error_already_set();
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(cells); ++i) {
      visit(PyCell_GET(PyTuple_GET_ITEM(cells, i)), PyTuple_GET_ITEM(names.ptr(), i));
    }
  }
  PyObject* globals = PyFunction_GET_GLOBALS(function);
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(code->co_names); ++i) {
    PyObject* name = PyTuple_GET_ITEM(code->co_names, i);
    PyObject* value = PyDict_GetItemWithError(globals, name);
    if (value != nullptr && (THPVariable_Check(value) || is_module(value))) visit(value, name);
  }
}

std::string TensorWalk::name() const {
  std::string name;
  for (const auto& [key, index] : path_) {
    if (index >= 0) name += "[" + std::to_string(index) + "]";
    if (key == nullptr) continue;
    if (!name.empty()) name += ".";
    name += py::str(key).cast<std::string>();
  }
  return name;
}

}  // namespace memsave_ext
