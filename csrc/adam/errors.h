// The errors of Adam's C++: memsave_ext/adam/errors.py has the messages.
#pragma once

#include <utility>

#include "../errors.h"  // this file has the same name

namespace memsave_ext::adam {

// Throws the exception that the function of this name there returns for these arguments; the Python
// fallback shares it. Takes the GIL. The caller may hold a collector's mutex, since no thread waits
// for that mutex with the GIL held.
template <typename... Facts>
[[noreturn]] void throw_error(const char* name, Facts&&... facts) {
  const pybind11::gil_scoped_acquire gil;
  throw_exception(registered("adam_errors").attr(name)(std::forward<Facts>(facts)...));
}

}  // namespace memsave_ext::adam
