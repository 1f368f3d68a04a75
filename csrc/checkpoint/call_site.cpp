#include "checkpoint/call_site.h"

#include <memory>
#include <unordered_map>

#include "checkpoint/call.h"
#include "compat.h"

namespace memsave_ext {
namespace {

struct Key {
  PyObject* code;
  int instruction;
  bool operator==(const Key& other) const {
    return code == other.code && instruction == other.instruction;
  }
};

struct KeyHash {
  size_t operator()(const Key& key) const {
    return std::hash<PyObject*>()(key.code) * 31 + static_cast<size_t>(key.instruction);
  }
};

}  // namespace

std::string CallSite::where() const {
  PyObject* file = reinterpret_cast<PyCodeObject*>(code)->co_filename;
  const char* name = PyUnicode_AsUTF8(file);
  if (name == nullptr) PyErr_Clear();
  return std::string(name == nullptr ? "?" : name) + ":" + std::to_string(line);
}

void warn_unlisted(const std::vector<std::string>& unlisted, CallSite* site) {
  if (unlisted.empty() || site == nullptr) return;
  std::string message =
      "CheckpointFunction.apply at " + site->where() +
      ": the function uses tensors that need a gradient but were not listed; they get none from "
      "this region: ";
  for (size_t i = 0; i < unlisted.size(); ++i) message += (i ? "; " : "") + unlisted[i];
  message += ". List them: CheckpointFunction.apply(function, n, *inputs, *parameters).";
  if (!site->warnings.insert(message).second) return;
  if (PyErr_WarnEx(PyExc_UserWarning, message.c_str(), 1) < 0) throw_python_error();
}

CallSite* current_call_site() {
  // Never destroyed: nodes outlive static destruction.
  static auto& sites = *new std::unordered_map<Key, std::unique_ptr<CallSite>, KeyHash>();
  PyFrameObject* frame = PyEval_GetFrame();
  if (frame == nullptr) return nullptr;
  PyCodeObject* code = PyFrame_GetCode(frame);
  const Key key{reinterpret_cast<PyObject*>(code), frame_instruction(frame)};
  auto& site = sites[key];
  if (site) {
    Py_DECREF(code);
  } else {  // keeps the reference, so that the address cannot come to mean other code
    site = std::make_unique<CallSite>(CallSite{key.code, PyFrame_GetLineNumber(frame)});
  }
  return site.get();
}

}  // namespace memsave_ext
