// Errors and warnings of checkpointing: what is wrong is found here, the words for it are in
// memsave_ext/checkpoint/errors.py, which the fallback shares.
#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <utility>

#include "checkpoint/call.h"

namespace memsave_ext {

// The package hands over the module once, when it is imported.
void register_errors(pybind11::object module);
const pybind11::object& registered_errors();

// Calls the module's function `name` with the facts. Needs the GIL.
template <typename... Facts>
pybind11::object call_errors(const char* name, Facts&&... facts) {
  try {
    return registered_errors().attr(name)(std::forward<Facts>(facts)...);
  } catch (pybind11::error_already_set& error) {
    error.restore();
    throw_python_error();
  }
}

// Throws the exception that the module's function `name` makes of the facts.
template <typename... Facts>
[[noreturn]] void throw_error(const char* name, Facts&&... facts) {
  const pybind11::gil_scoped_acquire gil;
  const pybind11::object error = call_errors(name, std::forward<Facts>(facts)...);
  PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(error.ptr())), error.ptr());
  throw_python_error();
}

}  // namespace memsave_ext
