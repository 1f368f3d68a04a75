#include "memory/moment.h"

#include <ATen/record_function.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/graph_task.h>

#include <chrono>

namespace memsave_ext::memory {

Moment Moment::now() {
  Moment moment;
  moment.time = std::chrono::duration_cast<std::chrono::nanoseconds>(
                    std::chrono::steady_clock::now().time_since_epoch())
                    .count();
  moment.thread = at::RecordFunction::currentThreadId();
  moment.in_backward = torch::autograd::get_current_graph_task_id() != -1;
  if (moment.in_backward) {
    if (const auto node = torch::autograd::get_current_node()) {
      moment.has_node = true;
      moment.node_thread = node->thread_id();
      moment.node_sequence = node->sequence_nr();
    }
  }
  return moment;
}

}  // namespace memsave_ext::memory
