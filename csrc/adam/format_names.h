// Converts formats from and to their names in Python and torch. Names are read only here.
#pragma once

#include <c10/core/ScalarType.h>
#include <pybind11/pybind11.h>

#include "adam/formats.h"

namespace memsave_ext::adam {

at::ScalarType scalar_type(Element element);  // `element` must not be kNone

// Returns the format that a group's bf16= names. Throws ValueError where no row has the name.
ParamFormat param_format_named(const pybind11::handle& bf16);

// Returns the format that a group's state_dtype= asks for; kAsParam where the parameter's type
// decides. Throws ValueError where no row has it.
StateFormat state_format_named(const pybind11::handle& state_dtype);

// Returns what kernels are compiled for: dtype, bf16=, names of states and rule, whether it closes.
pybind11::list combinations();

}  // namespace memsave_ext::adam
