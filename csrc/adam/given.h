// Python functions of the package that Adam's C++ calls.
#pragma once

#include <utility>

#include "errors.h"

namespace memsave_ext::adam {

// Returns the function of this name. Needs the GIL.
inline pybind11::object given(const char* name) { return registered(name); }

// Throws the exception that the function of this name in memsave_ext/adam/errors.py returns for
// these arguments; the Python fallback shares the messages there. Takes the GIL. The caller may
// hold a collector's mutex, since no thread waits for that mutex with the GIL held.
template <typename... Facts>
[[noreturn]] void throw_error(const char* name, Facts&&... facts) {
  const pybind11::gil_scoped_acquire gil;
  throw_exception(registered("adam_errors").attr(name)(std::forward<Facts>(facts)...));
}

}  // namespace memsave_ext::adam
