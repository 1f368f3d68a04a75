// The formats as Python and torch name them: the only place where names are read.
#pragma once

#include <c10/core/ScalarType.h>
#include <pybind11/pybind11.h>

#include "adam/formats.h"

namespace memsave_ext::adam {

at::ScalarType scalar_type(Element element);  // that is not kNone

// Of a group's bf16=. Throws for a name that no row has.
ParamFormat param_format_named(const pybind11::handle& bf16);

// Of a group's state_dtype=; kAsParam where the parameter's type decides. Throws likewise.
StateFormat state_format_named(const pybind11::handle& state_dtype);

// All rows and all combinations that exist, for memsave_ext/adam/formats.py to be compared with.
pybind11::dict describe_formats();

}  // namespace memsave_ext::adam
