#include "checkpoint/boundary.h"

#include <ATen/SequenceNumber.h>
#include <ATen/record_function.h>
#include <c10/core/ScalarType.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>

#include <algorithm>
#include <unordered_set>

#include "checkpoint/call.h"
#include "compat.h"

namespace memsave_ext::checkpoint {

namespace py = pybind11;
using torch::autograd::AccumulateGrad;
using torch::autograd::Edge;
using torch::autograd::Node;

namespace {

struct Sink : Node {
  torch::autograd::variable_list apply(torch::autograd::variable_list&& grads) override {
    return std::move(grads);
  }
  std::string name() const override { return "CheckpointFunctionSink"; }
};

Unlisted unlisted_tensor(const Edge& edge, const Node* user) {
  const auto& metadata = edge.function->input_metadata(edge.input_nr);
  const auto shape = metadata.shape_as_dim_vector();
  return {{shape.begin(), shape.end()},
          c10::typeMetaToScalarType(metadata.dtype()),
          user == nullptr ? std::string() : user->name()};
}

// Tells from which nodes a gradient reaches one of some edges.
class Leads {
 public:
  explicit Leads(c10::ArrayRef<Edge> edges) : edges_(edges) {}

  bool from(Node* node) {
    if (edges_.empty() || nowhere_.count(node) > 0) return false;
    std::vector<Node*> pending = {node};
    std::unordered_set<Node*> seen = {node};
    while (!pending.empty()) {
      node = pending.back();
      pending.pop_back();
      for (const auto& edge : node->next_edges()) {
        if (!edge.is_valid() || nowhere_.count(edge.function.get()) > 0) continue;
        if (std::find(edges_.begin(), edges_.end(), edge) != edges_.end()) return true;
        if (seen.insert(edge.function.get()).second) pending.push_back(edge.function.get());
      }
    }
    nowhere_.merge(seen);
    return false;
  }

 private:
  const c10::ArrayRef<Edge> edges_;
  std::unordered_set<Node*> nowhere_;
};

}  // namespace

RegionMark::RegionMark()
    : thread_id_(at::RecordFunction::currentThreadId()),
      first_sequence_nr_(at::sequence_number::peek()) {}

bool RegionMark::contains(const Node& node) const {
  return is_of_thread(node) && node.sequence_nr() >= first_sequence_nr_;
}

std::vector<Unlisted> close_region(const RegionMark& mark, std::vector<Edge>& roots,
                                   const std::vector<Edge>& listed, const std::vector<Edge>& sinks,
                                   size_t inputs) {
  std::vector<Unlisted> unlisted;
  std::unordered_set<Edge> reported;
  std::unordered_set<Node*> visited;
  Leads leads(c10::ArrayRef<Edge>(listed.data(), inputs));
  std::vector<Node*> pending;

  const auto follow = [&](Node* user, const Edge& edge) -> Edge {
    const auto match = std::find(listed.begin(), listed.end(), edge);
    if (match != listed.end()) {
      const auto& sink = sinks[match - listed.begin()];
      return sink.is_valid() ? sink : edge;
    }
    Node* node = edge.function.get();
    if (visited.count(node) > 0) return edge;
    const bool leaf = dynamic_cast<AccumulateGrad*>(node) != nullptr;
    if (leaf || !(mark.is_of_thread(*node) ? mark.contains(*node) : leads.from(node))) {
      if (reported.insert(edge).second) unlisted.push_back(unlisted_tensor(edge, user));
      return leaf ? edge : Edge();
    }
    visited.insert(node);
    pending.push_back(node);
    return edge;
  };

  for (auto& root : roots) root = follow(nullptr, root);
  while (!pending.empty()) {
    Node* node = pending.back();
    pending.pop_back();
    for (auto& edge : node->next_edges()) {
      if (edge.is_valid()) edge = follow(node, edge);
    }
  }
  return unlisted;
}

Edge make_sink(const at::Tensor& tensor) {
  NodePtr sink = make_node<Sink>();
  sink->add_input_metadata(tensor);
  return Edge(std::move(sink), 0);
}

bool has_tensor_hooks(const Edge& edge) {
  return !edge.function->tensor_pre_hooks().empty() || !edge.function->retains_grad_hooks().empty();
}

CallSite CallSite::current() {
  PyFrameObject* frame = PyEval_GetFrame();
  if (frame == nullptr) return {};
  auto* code = reinterpret_cast<PyObject*>(PyFrame_GetCode(frame));
  return {py::reinterpret_steal<py::object>(code), frame_instruction(frame)};
}

void warn_unlisted(const std::vector<Unlisted>& unlisted, const CallSite& site) {
  if (unlisted.empty() || !site.code) return;
  py::list found;
  for (const auto& [shape, dtype, user] : unlisted) {
    found.append(py::make_tuple(shape, dtype, user));
  }
  auto* code = reinterpret_cast<PyCodeObject*>(site.code.ptr());
  const int line = instruction_line(code, site.instruction);
  call_errors("warn_unlisted", site.code, site.instruction, line, found);
}

}  // namespace memsave_ext::checkpoint
