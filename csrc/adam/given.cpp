#include "adam/given.h"

namespace memsave_ext::adam {

namespace py = pybind11;

namespace {

// Never destroyed: the interpreter may be gone by then.
py::dict& functions() {
  static auto* const given = new py::dict;
  return *given;
}

}  // namespace

void give_functions(const py::dict& given) { functions().attr("update")(given); }

py::object given(const char* name) { return functions()[name]; }

}  // namespace memsave_ext::adam
