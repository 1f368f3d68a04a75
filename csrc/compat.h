// Every difference between the supported torch (2.11 to 2.15) and Python (3.10 to 3.13) versions.
#pragma once

#include <Python.h>
#include <torch/version.h>

#if TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR >= 13
#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/autograd/node.h>
#else
#include <torch/csrc/autograd/function.h>

#include <memory>
#endif

#include <utility>

namespace memsave_ext {

#if TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR >= 13
using NodePtr = c10::intrusive_ptr<torch::autograd::Node>;

template <typename T, typename... Args>
c10::intrusive_ptr<T> make_node(Args&&... args) {
  return c10::make_intrusive<T>(std::forward<Args>(args)...);
}
#else
using NodePtr = std::shared_ptr<torch::autograd::Node>;

// deleteNode frees long chains of nodes without recursion.
template <typename T, typename... Args>
std::shared_ptr<T> make_node(Args&&... args) {
  return std::shared_ptr<T>(new T(std::forward<Args>(args)...), torch::autograd::deleteNode);
}
#endif

// The instruction a frame is at: tells two calls on one line apart where Python says so.
inline int frame_instruction(PyFrameObject* frame) {
#if PY_VERSION_HEX >= 0x030B0000
  return PyFrame_GetLasti(frame);
#else
  return PyFrame_GetLineNumber(frame);
#endif
}

}  // namespace memsave_ext
