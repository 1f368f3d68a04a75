// Sums over the processes of a torch.distributed group.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <string>

namespace memsave_ext::batch_norm {

// Returns the sum. Calls the operators boxed, because the C++ types of these two differ
// between versions of torch.
inline at::Tensor sum_over_group(const at::Tensor& tensor, const std::string& group) {
  auto& dispatcher = c10::Dispatcher::singleton();
  static const auto all_reduce = dispatcher.findSchemaOrThrow("_c10d_functional::all_reduce", "");
  static const auto wait = dispatcher.findSchemaOrThrow("_c10d_functional::wait_tensor", "");
  torch::jit::Stack stack{tensor, std::string("sum"), group};
  all_reduce.callBoxed(stack);
  wait.callBoxed(stack);
  return stack.front().toTensor();
}

}  // namespace memsave_ext::batch_norm
