// Binds the recorder of remat to memsave_ext._C.
#pragma once

#include <pybind11/pybind11.h>

namespace memsave_ext::remat {

void bind(pybind11::module_& m);

}  // namespace memsave_ext::remat
