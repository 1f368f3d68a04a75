#include "checkpoint/early_stop.h"

#include <ATen/SequenceNumber.h>
#include <torch/csrc/autograd/python_variable.h>

#include <unordered_set>
#include <vector>

#include "checkpoint/rules.h"

namespace memsave_ext::checkpoint {

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

}  // namespace memsave_ext::checkpoint
