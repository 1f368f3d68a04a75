// The boundary of a region of CheckpointFunction: which edges of a recompute's graph lead out of
// it, and the warning about those to tensors that were not listed.
#pragma once

#include <ATen/core/Tensor.h>
#include <pybind11/pybind11.h>
#include <torch/csrc/autograd/edge.h>

#include <string>
#include <vector>

#include "compat.h"

namespace memsave_ext::checkpoint {

// A tensor that a region uses although the caller did not list it.
struct Unlisted {
  std::vector<c10::SymInt> shape;
  c10::ScalarType dtype;
  std::string user;  // name of the node; empty for an output
};

// Tells the region's nodes from others: those that this thread made since the mark are the
// region's; leaves and older nodes are outside. Of another thread's nodes, whose numbers say
// nothing here, those are the region's that lead to its inputs.
class RegionMark {
 public:
  RegionMark();
  bool contains(const torch::autograd::Node& node) const;
  bool is_of_thread(const torch::autograd::Node& node) const {
    return node.thread_id() == thread_id_;
  }

 private:
  uint64_t thread_id_;
  uint64_t first_sequence_nr_;
};

// Walks the region's graph from `roots`, which it may edit:
//  - edges to `listed[i]` become edges to `sinks[i]` where that is set,
//  - edges to older nodes that are not listed are cut.
// The first `inputs` of `listed` are tensors of this run alone, to which no other graph leads.
// Returns the leaves and older nodes that the region uses and `listed` does not name.
std::vector<Unlisted> close_region(const RegionMark& mark,
                                   std::vector<torch::autograd::Edge>& roots,
                                   const std::vector<torch::autograd::Edge>& listed,
                                   const std::vector<torch::autograd::Edge>& sinks, size_t inputs);

// A stand-in for the gradient edge of `tensor`, which has hooks: gradients are captured at the
// stand-in, and the hooks run once, when the outer graph reaches the tensor itself.
torch::autograd::Edge make_sink(const at::Tensor& tensor);

// Whether capturing a gradient at `edge` would run hooks of the tensor behind it.
bool has_tensor_hooks(const torch::autograd::Edge& edge);

// An instruction of Python code that calls CheckpointFunction.apply. Made and freed with the GIL.
struct CallSite {
  pybind11::object code;  // null where no Python frame was running
  int instruction = 0;

  static CallSite current();
};

// Issues one UserWarning that names every unlisted tensor, or none if there is none. Throws
// python_error where warnings are errors.
void warn_unlisted(const std::vector<Unlisted>& unlisted, const CallSite& site);

}  // namespace memsave_ext::checkpoint
