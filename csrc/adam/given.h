// Python functions of the package that C++ calls. The package hands them over, so that C++ imports
// none of its modules.
#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <utility>

namespace memsave_ext::adam {

// Adds functions, by name. The package calls it with those that C++ needs.
void give_functions(const pybind11::dict& functions);

// Returns the function of this name. Needs the GIL.
pybind11::object given(const char* name);

// Throws this Python exception. Needs the GIL.
[[noreturn]] void throw_exception(const pybind11::object& error);

// Throws the exception that the function of this name in memsave_ext/adam/errors.py returns for
// these arguments; the Python fallback shares the messages there. Takes the GIL. The caller may
// hold a collector's mutex, since no thread waits for that mutex with the GIL held.
template <typename... Facts>
[[noreturn]] void throw_error(const char* name, Facts&&... facts) {
  const pybind11::gil_scoped_acquire gil;
  throw_exception(given("errors").attr(name)(std::forward<Facts>(facts)...));
}

}  // namespace memsave_ext::adam
