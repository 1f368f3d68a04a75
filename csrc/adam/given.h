// Functions of the Python package that the native part calls: it imports none of its modules.
#pragma once

#include <pybind11/pybind11.h>

namespace memsave_ext::adam {

// By name, when the package is imported.
void give_functions(const pybind11::dict& functions);

// Needs the GIL.
pybind11::object given(const char* name);

}  // namespace memsave_ext::adam
