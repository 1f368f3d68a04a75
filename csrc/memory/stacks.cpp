#include "memory/stacks.h"

#include <ATen/record_function.h>
#include <Python.h>
#include <torch/csrc/profiler/combined_traceback.h>

#include <optional>

namespace memsave_ext::memory {
namespace {

thread_local int watchers = 0;
thread_local at::CallbackHandle callback = at::INVALID_CALLBACK_HANDLE;

// Operators call operators; all of them are given the stack of the outermost one.
thread_local int depth = 0;
thread_local Stack of_outermost;

std::unique_ptr<at::ObserverContext> begin_operator(const at::RecordFunction&) {
  if (depth++ == 0) of_outermost = stack_here();
  return nullptr;
}

void end_operator(const at::RecordFunction&, at::ObserverContext*) {
  if (--depth == 0) of_outermost.reset();
}

}  // namespace

Stack stack_here() {
  // A thread that Python does not know has no stack.
  if (PyGILState_GetThisThreadState() == nullptr) return nullptr;
  return torch::CapturedTraceback::gather(true, false, false);
}

void watch_operators() {
  if (watchers++ > 0) return;
  callback = at::addThreadLocalCallback(at::RecordFunctionCallback(&begin_operator, &end_operator)
                                            .scopes({at::RecordScope::FUNCTION}));
}

void unwatch_operators() {
  if (--watchers > 0) return;
  at::removeCallback(callback);
}

Stack stack_of_operator() {
  if (depth > 0) return of_outermost;
  return PyGILState_Check() ? stack_here() : nullptr;
}

}  // namespace memsave_ext::memory
