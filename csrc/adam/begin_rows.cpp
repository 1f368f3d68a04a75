#include "adam/begin_rows.h"

#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <variant>

#include "adam/backward.h"
#include "adam/collector.h"
#include "adam/hook.h"
#include "adam/rows.h"

namespace memsave_ext::adam {

namespace py = pybind11;
using torch::autograd::AccumulateGrad;
using torch::autograd::Node;

namespace {

int64_t edges_to(const Node& accumulator, const Node& from) {
  const auto& edges = from.next_edges();
  return std::count_if(edges.begin(), edges.end(),
                       [&](const auto& edge) { return edge.function.get() == &accumulator; });
}

// Returns whether the accumulator may get gradients from elsewhere in this backward. The engine
// does not show the node at which a backward begins: unless it is `node`, edges that are not seen
// may be its own.
bool has_other_edges(const Node& node, const NodePtr& accumulator) {
  const auto* seen = torch::autograd::get_current_graph_task_nodes_in_graph();
  const bool begins_here = seen->count(const_cast<Node*>(&node)) == 0;
  int64_t edges = begins_here ? edges_to(*accumulator, node) : 0;
  for (const Node* other : *seen) edges += edges_to(*accumulator, *other);
  return edges != 1 || (!begins_here && accumulator.use_count() > 1);
}

const char* obstacle_in_graph(const Node& node, const NodePtr& accumulator) {
  if (torch::autograd::get_current_graph_task_id() == -1) return "no backward is running";
  if (!torch::autograd::get_current_graph_task_exec_info()->empty()) {
    return "autograd.grad() or backward(inputs=) asks for gradients of certain tensors";
  }
  if (torch::autograd::get_current_graph_task_keep_graph()) return "retain_graph=True";
  if (has_other_edges(node, accumulator)) {
    return "the weight is used elsewhere, too (as a tied embedding is), or in another graph";
  }
  return nullptr;
}

const char* obstacle_in_intake(Intake intake) {
  if (intake == Intake::kKeep || intake == Intake::kDrop) return "the optimizer is paused";
  return intake == Intake::kStep ? nullptr : "gradients are accumulated";
}

const char* obstacle_in_hooks(const NodePtr& accumulator, const Entry& entry,
                              const py::object& param) {
  if (entry.reduced_by_ddp || is_reduced_by_ddp(accumulator)) {
    return "DistributedDataParallel reduces the whole gradient";
  }
  const bool hooked = !accumulator->tensor_pre_hooks().empty() ||
                      !accumulator->pre_hooks().empty() || !accumulator->post_hooks().empty();
  return hooked || has_python_hooks(param) ? "a hook on the weight has to see the whole gradient"
                                           : nullptr;
}

}  // namespace

py::object begin_rows(int64_t input) {
  const NodePtr node = torch::autograd::get_current_node();
  TORCH_CHECK(node, "begin_rows() is for the backward of an autograd node");
  const NodePtr& accumulator = node->next_edge(input).function;
  auto* const accumulates = dynamic_cast<AccumulateGrad*>(accumulator.get());
  if (accumulates == nullptr) return py::str("the weight is computed from other tensors");
  const auto param = py::reinterpret_steal<py::object>(THPVariable_Wrap(accumulates->variable));
  const Attachment attached = find_hook(param);
  if (attached.collector == nullptr || attached.collector->optimizer().is_none()) {
    return py::str("no optimizer of memsave_ext steps the weight in backward");
  }
  const auto collector = attached.collector->shared_from_this();
  const char* obstacle = obstacle_in_graph(*node, accumulator);
  if (!obstacle) obstacle = obstacle_in_intake(collector->intake());
  if (!obstacle) obstacle = obstacle_in_hooks(accumulator, *attached.entry, param);
  if (obstacle) return py::str(obstacle);

  std::variant<std::string, std::unique_ptr<StepInRows>> begun = "the optimizer has been deleted";
  {
    const py::gil_scoped_release no_gil;
    const auto backward = collector->backwards().begin(*collector);
    if (backward) {
      const std::lock_guard lock(collector->mutex());
      begun = backward->step_in_rows(*attached.entry, accumulator);
    }
  }
  if (const auto* reason = std::get_if<std::string>(&begun)) return py::str(*reason);
  return py::cast(std::move(std::get<std::unique_ptr<StepInRows>>(begun)));
}

}  // namespace memsave_ext::adam
