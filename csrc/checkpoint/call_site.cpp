#include "checkpoint/call_site.h"

#include "checkpoint/errors.h"
#include "compat.h"

namespace memsave_ext {

namespace py = pybind11;

CallSite CallSite::current() {
  PyFrameObject* frame = PyEval_GetFrame();
  if (frame == nullptr) return {};
  auto* code = reinterpret_cast<PyObject*>(PyFrame_GetCode(frame));
  return {py::reinterpret_steal<py::object>(code), frame_instruction(frame)};
}

void warn_unlisted(const std::vector<Unlisted>& unlisted, const CallSite& site) {
  if (unlisted.empty() || !site.code) return;
  py::list found;
  for (const auto& [shape, dtype, user] : unlisted) {
    found.append(py::make_tuple(shape, dtype, user));
  }
  auto* code = reinterpret_cast<PyCodeObject*>(site.code.ptr());
  const int line = instruction_line(code, site.instruction);
  call_errors("warn_unlisted", site.code, site.instruction, line, found);
}

}  // namespace memsave_ext
