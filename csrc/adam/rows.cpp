#include "adam/rows.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/record_function.h>
#include <c10/core/DeviceGuard.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <vector>

#include "adam/backward.h"
#include "adam/collector.h"
#include "adam/elsewhere.h"
#include "adam/hook.h"
#include "adam/items.h"
#include "adam/ops.h"
#include "checkpoint/stepped.h"

namespace memsave_ext::adam {

using at::Tensor;
namespace py = pybind11;
using torch::autograd::AccumulateGrad;
using torch::autograd::Node;

namespace {

// Of a prediction, which has no values: its memory is on the meta device.
bool is_fake(const Tensor& tensor) {
  return tensor.key_set().has(c10::DispatchKey::Python) && tensor.has_storage() &&
         tensor.storage().device().is_meta();
}

int64_t bytes_of(const Tensor& tensor) { return tensor.defined() ? tensor.element_size() : 0; }

}  // namespace

const char* StepInRows::obstacle(const Parameter& parameter) {
  const Tensor& param = parameter.local;
  if (lies_elsewhere(parameter)) return "its states lie elsewhere, from where all are fetched";
  const at::AutoDispatchBelowADInplaceOrView guard;  // autograd has no part in a step
  if (!is_fake(param) &&
      (!needs_only_kernels(parameter) || param.is_meta() || param.is_inference())) {
    return "its memory is not that of an ordinary tensor";
  }
  const auto in_rows = [](const Tensor& tensor) {
    return !tensor.defined() || tensor.dim() == 0 || tensor.is_contiguous();
  };
  bool all = in_rows(param) && !param.is_complex();
  for (const auto& state : kStateNames) all = all && in_rows(parameter.state.*state.tensor);
  return all ? nullptr : "its rows, or those of its state, do not follow each other in memory";
}

StepInRows::StepInRows(const Parameter& parameter)
    : param_(parameter.local), state_(parameter.state), group_(*parameter.group) {
  if (is_fake(param_)) {
    checkpoint::note_step(param_, parameter.position);
    return;
  }
  const auto device = param_.device();
  const c10::DeviceGuard on_device(device);
  Operands operands;
  Parameter advanced = parameter;
  std::vector<Item> items = {item_of(parameter, operands)};
  std::vector<Parameter*> of_items = {&advanced};
  advance_steps(items, of_items, kernels_for(device), device.is_cpu(), stream_of(device));
  whole_ = items.front();
  whole_.options = &group_.options;
  if (group_.lr.defined()) whole_.device_lr = group_.lr.const_data_ptr<float>();
  torch::autograd::impl::bump_version(param_);
  checkpoint::note_step(param_, parameter.position);
}

void StepInRows::step(int64_t first, const Tensor& grad) const {
  if (is_fake(param_)) return;
  RECORD_FUNCTION("memsave_ext::adam_step_rows", std::vector<c10::IValue>{});
  const int64_t row = param_.numel() / std::max<int64_t>(1, param_.size(0));
  const int64_t begin = first * row;
  TORCH_CHECK(first >= 0 && begin % kBlock == 0 && begin + grad.numel() <= param_.numel() &&
                  grad.is_contiguous() && grad.scalar_type() == param_.scalar_type() &&
                  grad.device() == param_.device(),
              "memsave_ext: these rows cannot be stepped: ", grad.sizes(), " from ", first, " on");
  const auto moved = [begin](void* memory, const Tensor& of) -> void* {
    return memory == nullptr ? nullptr : static_cast<char*>(memory) + begin * bytes_of(of);
  };
  Item item = whole_;
  item.param = moved(item.param, param_);
  item.param_low_part = moved(item.param_low_part, state_.param_low_part);
  item.grad = grad.const_data_ptr();
  item.exp_avg = moved(item.exp_avg, state_.first());
  item.exp_avg_sq = moved(item.exp_avg_sq, state_.exp_avg_sq);
  item.max_exp_avg_sq = moved(item.max_exp_avg_sq, state_.max_exp_avg_sq);
  if (item.exp_avg_scale != nullptr) {
    const int64_t blocks = blocks_of(item.state_format, begin);
    item.exp_avg_scale += blocks;
    if (item.exp_avg_sq_scale != nullptr) item.exp_avg_sq_scale += blocks;
  }
  item.numel = grad.numel();
  item.first_block = begin / kBlock;
  const c10::DeviceGuard on_device(param_.device());
  kernels_for(param_.device()).step(&item, 1, stream_of(param_.device()));
}

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
    return "autograd.grad() or backward(inputs=) asks for certain gradients";
  }
  if (torch::autograd::get_current_graph_task_keep_graph()) return "retain_graph=True";
  if (has_other_edges(node, accumulator)) {
    return "it is used elsewhere, too (as a tied embedding is), or in a graph that is kept";
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
    return "DistributedDataParallel reduces it";
  }
  const bool hooked = !accumulator->tensor_pre_hooks().empty() ||
                      !accumulator->pre_hooks().empty() || !accumulator->post_hooks().empty();
  return hooked || has_python_hooks(param) ? "a hook is to see it" : nullptr;
}

}  // namespace

py::object begin_rows(int64_t input) {
  const NodePtr node = torch::autograd::get_current_node();
  TORCH_CHECK(node, "begin_rows() is for the backward of an autograd node");
  const NodePtr& accumulator = node->next_edge(input).function;
  auto* const accumulates = dynamic_cast<AccumulateGrad*>(accumulator.get());
  if (accumulates == nullptr) return py::str("it is computed from other tensors");
  const auto param = py::reinterpret_steal<py::object>(THPVariable_Wrap(accumulates->variable));
  const Attachment attached = find_hook(param);
  if (attached.collector == nullptr || attached.collector->optimizer().is_none()) {
    return py::str("no optimizer of memsave_ext steps it in backward");
  }
  const auto collector = attached.collector->shared_from_this();
  const char* obstacle = obstacle_in_graph(*node, accumulator);
  if (!obstacle) obstacle = obstacle_in_intake(collector->intake());
  if (!obstacle) obstacle = obstacle_in_hooks(accumulator, *attached.entry, param);
  if (obstacle) return py::str(obstacle);

  std::variant<std::string, std::unique_ptr<StepInRows>> begun = "the optimizer is gone";
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
