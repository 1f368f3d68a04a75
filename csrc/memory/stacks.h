// Python stacks of allocations.
#pragma once

#include <memory>

namespace torch {
struct CapturedTraceback;
}

namespace memsave_ext::memory {

using Stack = std::shared_ptr<torch::CapturedTraceback>;

// Returns this thread's present stack; null where Python does not know the thread. Waits for the
// GIL: call it without any lock for which the GIL's holder may wait.
Stack stack_here();

// Takes a stack whenever an outermost operator begins, on this thread and in its backwards. This is
// for CUDA: its allocator reports with its lock held, for which a thread with the GIL waits to free
// a tensor, so that a stack cannot be taken then. Calls nest; the last unwatch_operators() on the
// same thread ends it.
void watch_operators();
void unwatch_operators();

// Returns the stack that was taken for the operator that runs on this thread. Where none runs, the
// present stack if the thread has the GIL, else null. Never waits.
Stack stack_of_operator();

}  // namespace memsave_ext::memory
