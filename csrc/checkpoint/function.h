// CheckpointFunction.apply(function, n, *args), the explicit form of checkpointing, and the
// autograd node behind it: it keeps the inputs of a region, runs it again in backward and
// differentiates that. Chen et al. 2016, arXiv 1604.06174.
#pragma once

#include <Python.h>
#include <pybind11/pybind11.h>
#include <torch/csrc/autograd/saved_variable.h>

#include <optional>
#include <string>
#include <vector>

#include "checkpoint/boundary.h"
#include "checkpoint/call.h"
#include "checkpoint/forward_record.h"
#include "checkpoint/outside.h"
#include "checkpoint/stepped.h"
#include "checkpoint/surroundings.h"
#include "compat.h"

namespace memsave_ext::checkpoint {

// A listed parameter: the function reaches it by itself, the node only checks and differentiates.
struct ListedParameter {
  at::Tensor tensor;
  uint32_t version;
};

// One element of what the function returned.
constexpr int kNotDifferentiable = -1;
using OutputNumbers = std::vector<int>;  // input number of the node, or kNotDifferentiable

class CheckpointNode : public torch::autograd::Node {
 public:
  // Next edges are those of the inputs, then of the parameters, in order. Needs the GIL.
  // `input_types` are those of inputs that are of a subclass of torch.Tensor, null for the others.
  CheckpointNode(pybind11::object function, std::vector<torch::autograd::SavedVariable> inputs,
                 std::vector<pybind11::object> input_types, std::vector<ListedParameter> parameters,
                 OutsideTensors outside, Surroundings surroundings, ForwardRecord record,
                 CallSite call_site, torch::autograd::edge_list next_edges);
  ~CheckpointNode() override;

  void set_outputs(OutputNumbers numbers) { output_numbers_ = std::move(numbers); }

  torch::autograd::variable_list apply(torch::autograd::variable_list&& grads) override;
  void release_variables() override;
  std::string name() const override { return "CheckpointFunctionBackward"; }

 private:
  struct Saved;
  struct Recomputed;

  // A copy, because another backward may release the node at any time.
  Saved unpack();
  Recomputed recompute(const Saved& saved, const torch::autograd::variable_list& grads);
  // The steps of recompute().
  FunctionResult call_again(const Saved& saved, const torch::autograd::variable_list& arguments);
  void find_roots(const FunctionResult& result, const torch::autograd::variable_list& grads,
                  Recomputed& graph) const;
  void find_targets(const RegionMark& mark, const torch::autograd::variable_list& arguments,
                    const Saved& saved, Recomputed& graph);
  void release_python();
  // Makes the gradients raise when they are differentiated again.
  void forbid_double_backward(torch::autograd::variable_list& results,
                              const torch::autograd::variable_list& grads) const;

  pybind11::object function_;
  std::vector<torch::autograd::SavedVariable> inputs_;
  std::vector<pybind11::object> input_types_;
  std::vector<ListedParameter> parameters_;
  const OutsideTensors outside_;
  Surroundings surroundings_;
  ForwardRecord forward_record_;
  CallSite call_site_;
  OutputNumbers output_numbers_;
  const Pending pending_;
  bool released_ = false;
};

// Has the signature of a METH_FASTCALL function.
PyObject* checkpoint_apply(PyObject* self, PyObject* const* args, Py_ssize_t nargs);

}  // namespace memsave_ext::checkpoint
