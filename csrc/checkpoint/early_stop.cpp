#include "checkpoint/early_stop.h"

#include <ATen/SequenceNumber.h>
#include <torch/csrc/autograd/python_variable.h>

#include <unordered_set>
#include <vector>

#include "checkpoint/outside.h"
#include "checkpoint/rules.h"

namespace memsave_ext::checkpoint {

using torch::autograd::Node;

namespace {

constexpr int64_t kSmall = 4096;  // elements: an operation on them takes less than the exception
constexpr uint64_t kShort = 2;    // operations

}  // namespace

bool fills_after_saving(const Node& node) {
  return begins_with_any(node.name(), rules().fills_after_saving);
}

bool last_save_is_filled_later(PyObject* outputs, uint64_t sequence_nr, bool otherwise) {
  std::vector<Node*> pending;
  std::unordered_set<Node*> seen;
  for_each_tensor(outputs, [&](PyObject* tensor) {
    if (const auto& made_by = THPVariable_Unpack(tensor).grad_fn())
      pending.push_back(made_by.get());
  });
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
  return otherwise;
}

bool worth_stopping(uint64_t sequence_nr, int64_t numel) {
  return numel > kSmall || at::sequence_number::peek() - sequence_nr > kShort;
}

}  // namespace memsave_ext::checkpoint
