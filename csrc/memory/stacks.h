// What asked for an allocation: a line of Python, and an operator.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <tuple>
#include <vector>

namespace torch {
struct CapturedTraceback;
}

namespace memsave_ext::memory {

struct Origin {
  std::shared_ptr<torch::CapturedTraceback> stack;  // null where there is none
  // Of the outermost operator that runs, as "aten::linear", or of the node of backward that runs
  // none, as "MulBackward0"; else empty.
  std::string operator_name;

  // Returns the frames, innermost first: file, line, function. Needs the GIL.
  std::vector<std::tuple<std::string, int64_t, std::string>> frames() const;
};

// Follows the operators that begin on this thread and in its backwards. With `stacks` a stack is
// taken whenever an outermost one begins. This is for CUDA: its allocator reports with its lock
// held, for which a thread with the GIL waits to free a tensor, so that a stack cannot be taken
// then. Calls nest; each has an unwatch_operators() with the same argument on the same thread.
void watch_operators(bool stacks);
void unwatch_operators(bool stacks);

// Returns the present stack, which is null where Python does not know the thread, and the operator
// if this thread's are watched. Waits for the GIL: call it without any lock for which the GIL's
// holder may wait.
std::shared_ptr<const Origin> origin_here();

// Returns the stack that was taken for the operator that runs on this thread. Where none runs, the
// present stack if the thread has the GIL, else null. Never waits.
std::shared_ptr<const Origin> origin_of_operator();

}  // namespace memsave_ext::memory
