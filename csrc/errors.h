// Python functions of the package that C++ calls, and Python exceptions that it throws. The package
// hands the functions over when it is imported, so that C++ imports none of its modules.
#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

namespace memsave_ext {

// By name. Never destroyed: the interpreter may be gone when static objects are.
inline pybind11::dict& registered_functions() {
  static auto* const functions = new pybind11::dict;
  return *functions;
}

// Adds functions, or modules of them.
inline void register_functions(const pybind11::dict& functions) {
  registered_functions().attr("update")(functions);
}

// Needs the GIL.
inline pybind11::object registered(const char* name) { return registered_functions()[name]; }

// Throws this Python exception. Needs the GIL.
[[noreturn]] inline void throw_exception(const pybind11::object& error) {
  PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(error.ptr())), error.ptr());
  throw pybind11::error_already_set();
}

}  // namespace memsave_ext
