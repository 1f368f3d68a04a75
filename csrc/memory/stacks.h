// Python stacks of allocations.
#pragma once

#include <memory>

namespace torch {
struct CapturedTraceback;
}

namespace memsave_ext::memory {

using Stack = std::shared_ptr<torch::CapturedTraceback>;

// Of this thread, as it is now. Awaits the GIL: never with a lock that its holder may await.
Stack stack_here();

// CUDA's allocator reports with its lock held, which a thread with the GIL awaits to free a tensor.
// So the stack is taken before, when an operator begins, from this on, on this thread and in its
// backwards. Calls nest; the last unwatch_operators() on the same thread ends it.
void watch_operators();
void unwatch_operators();

// Of the operator that runs on this thread; without one, as it is now where the thread has the GIL.
// Never waits.
Stack stack_of_operator();

}  // namespace memsave_ext::memory
