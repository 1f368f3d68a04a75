#include "checkpoint/recompute.h"

#include <ATen/SequenceNumber.h>
#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <unordered_set>
#include <utility>
#include <vector>

#include "checkpoint/call.h"
#include "checkpoint/rules.h"
#include "compat.h"
#include "locks.h"

namespace memsave_ext::checkpoint {

namespace py = pybind11;
using torch::autograd::Node;

namespace {

constexpr int64_t kSmall = 4096;  // elements: an operation on them takes less than the exception
constexpr uint64_t kShort = 2;    // operations

void collect_nodes(PyObject* value, std::vector<Node*>& nodes) {
  if (THPVariable_Check(value)) {
    const auto& grad_fn = THPVariable_Unpack(value).grad_fn();
    if (grad_fn) nodes.push_back(grad_fn.get());
  } else if (PyDict_Check(value)) {
    PyObject *key, *item;
    Py_ssize_t position = 0;
    while (PyDict_Next(value, &position, &key, &item)) collect_nodes(item, nodes);
  } else if (PyTuple_Check(value) || PyList_Check(value)) {
    for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(value); ++i) {
      collect_nodes(PySequence_Fast_GET_ITEM(value, i), nodes);
    }
  }
}

}  // namespace

bool fills_after_saving(const Node& node) {
  return begins_with_any(node.name(), rules().fills_after_saving);
}

bool last_save_is_filled_later(PyObject* outputs, uint64_t sequence_nr) {
  std::vector<Node*> pending;
  std::unordered_set<Node*> seen;
  collect_nodes(outputs, pending);
  while (!pending.empty()) {
    Node* node = pending.back();
    pending.pop_back();
    if (node->sequence_nr() + 1 == sequence_nr) return fills_after_saving(*node);
    // Leaves have the largest number and no next edges.
    if (node->sequence_nr() < sequence_nr || !seen.insert(node).second) continue;
    for (const auto& edge : node->next_edges()) {
      if (edge.is_valid()) pending.push_back(edge.function.get());
    }
  }
  return false;
}

bool worth_stopping(uint64_t sequence_nr, int64_t numel) {
  return numel > kSmall || at::sequence_number::peek() - sequence_nr > kShort;
}

Recompute::Recompute(Region& region, const BackwardKey& key)
    : region_(region), key_(key), forward_finished_(region.forward_finished_) {
  const std::lock_guard<Lock> lock(region.state_mutex_);
  may_stop_ = region.stop_at_last_save_;
  if (!forward_finished_) {
    // A backward inside the function asks: the recompute must not run further than the forward has
    // come, whatever the options are. The node that asks is, in practice, the one that saved last.
    const NodePtr asking = torch::autograd::get_current_node();
    may_stop_ = asking && !fills_after_saving(*asking);
  }
  needed_ = region.slots_.size();
  while (needed_ > 0 && region.slots_[needed_ - 1].holders == 0) --needed_;
  region.values_.push_back({key, std::vector<at::Tensor>(region.slots_.size())});
}

bool Recompute::save(const at::Tensor& tensor) {
  if (stopped_) return true;  // the function caught the exception that stops it
  const size_t index = count_++;
  at::Tensor freed;
  const std::lock_guard<Lock> lock(region_.state_mutex_);
  const auto values = region_.find(key_);
  if (index >= values->tensors.size()) {
    stopped_ = !forward_finished_;
    return !stopped_;
  }
  if (may_stop_ && index == needed_) {
    // Nothing that is saved from here on is needed, and the last operation that is needed has run.
    // Stopping before an operation has run is allowed only at the forward's very last save.
    stopped_ = true;
    return false;
  }
  const Slot& slot = region_.slots_[index];
  if (region_.options_.check_determinism) {
    if (!slot.metadata.fits(tensor)) {
      different_.push_back({index, slot.metadata, Metadata::of(tensor)});
    }
    const auto version = static_cast<uint32_t>(tensor._version());
    if (slot.is_storage_of(tensor) && version != slot.version) {
      mutated_.push_back({index, slot.metadata, slot.version, version});
    }
  }
  if (slot.holders > 0) {
    freed = std::exchange(values->tensors[index], tensor);
  }
  stopped_ = may_stop_ && index + 1 == values->tensors.size();
  return !stopped_;
}

void Recompute::check(const std::vector<Read>& reads) const {
  const size_t saved = region_.slots_.size();
  if (mutated_.empty() && reads.empty() && different_.empty() && (stopped_ || count_ == saved)) {
    return;
  }
  py::list mutations, differences;
  for (const auto& [position, metadata, in_forward, in_recompute] : mutated_) {
    mutations.append(py::make_tuple(position, metadata.as_tuple(), in_forward, in_recompute));
  }
  for (const auto& [position, in_forward, in_recompute] : different_) {
    differences.append(py::make_tuple(position, in_forward.as_tuple(), in_recompute.as_tuple()));
  }
  const py::object error =
      registered("checkpoint_rules")
          .attr("difference")(mutations, as_list(reads), differences, saved, count_, stopped_,
                              forward_finished_, region_.options_.early_stop, region_.on_error_);
  if (!error.is_none()) throw_exception(error);
}

std::shared_ptr<Saved> RecomputePacker::pack(at::Tensor& tensor) {
  // Never with a graph: the value would keep the recompute's graph alive.
  if (tensor.requires_grad()) tensor = PyGILState_Check() ? detached(tensor) : tensor.detach();
  if (!run_.save(tensor)) throw_stop();
  return nullptr;
}

}  // namespace memsave_ext::checkpoint
