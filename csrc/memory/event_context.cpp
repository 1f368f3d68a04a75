#include "memory/event_context.h"

#include <ATen/record_function.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/graph_task.h>

#include <chrono>

namespace memsave_ext::memory {

EventContext EventContext::now() {
  EventContext context;
  context.time = std::chrono::duration_cast<std::chrono::nanoseconds>(
                     std::chrono::steady_clock::now().time_since_epoch())
                     .count();
  context.thread = at::RecordFunction::currentThreadId();
  context.in_backward = torch::autograd::get_current_graph_task_id() != -1;
  if (context.in_backward) {
    if (const auto node = torch::autograd::get_current_node()) {
      context.has_node = true;
      context.node_thread = node->thread_id();
      context.node_sequence = node->sequence_nr();
    }
  }
  return context;
}

}  // namespace memsave_ext::memory
