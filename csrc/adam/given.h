// What the native part calls of the Python package: it imports none of its modules.
#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <utility>

namespace memsave_ext::adam {

// By name, when the package is imported.
void give_functions(const pybind11::dict& functions);

// Needs the GIL.
pybind11::object given(const char* name);

// Needs the GIL.
[[noreturn]] void throw_exception(const pybind11::object& error);

// Throws what the function of this name in memsave_ext/adam/errors.py makes of the facts. What is
// wrong is found here, the words for it are there, which the fallback shares. Takes the GIL, also
// with the mutex of a stepper: nobody waits for that with the GIL.
template <typename... Facts>
[[noreturn]] void throw_error(const char* name, Facts&&... facts) {
  const pybind11::gil_scoped_acquire gil;
  throw_exception(given("errors").attr(name)(std::forward<Facts>(facts)...));
}

}  // namespace memsave_ext::adam
