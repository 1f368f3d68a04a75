#include "adam/given.h"

namespace memsave_ext::adam {

namespace py = pybind11;

namespace {

// Never destroyed: the interpreter may be gone when static objects are.
py::dict& functions() {
  static auto* const given = new py::dict;
  return *given;
}

}  // namespace

void give_functions(const py::dict& given) { functions().attr("update")(given); }

py::object given(const char* name) { return functions()[name]; }

void throw_exception(const py::object& error) {
  PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(error.ptr())), error.ptr());
  throw py::error_already_set();
}

}  // namespace memsave_ext::adam
