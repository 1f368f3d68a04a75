// Converts parameters to the arguments of the operator that steps them, and back. One call takes
// parameters of several groups and formats; the lists of tensors hold only those that are there,
// and `present` says which those are. The operator's schema is in memsave_ext/_ops.py.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/ArrayRef.h>

#include <optional>
#include <vector>

#include "adam/parameter.h"

namespace memsave_ext::adam {

// The C++ signature of memsave_ext::adam_step_.
using StepOperator = void(at::TensorList params, at::TensorList grads, at::TensorList states,
                          at::IntArrayRef present, at::IntArrayRef phases,
                          at::IntArrayRef positions, at::IntArrayRef groups,
                          at::ArrayRef<double> options, at::IntArrayRef modes, at::TensorList lrs,
                          const std::optional<at::Tensor>& grad_scale,
                          const std::optional<at::Tensor>& found_inf,
                          const std::optional<at::Tensor>& factor,
                          const std::optional<at::Tensor>& skip);

// The operator's lists.
template <typename Tensors, typename Ints, typename Doubles>
struct StepLists {
  Tensors params, grads, states;
  // One number per parameter. present: a bit for each tensor that it has, bit 0 for the gradient
  // and the next ones for its states in the order of kStateNames. positions: in the optimizer.
  // groups: the index of its group in the lists below.
  Ints present, phases, positions, groups;
  // A fixed count of numbers per group, in the order in which pack_group() writes them.
  Doubles options;
  Ints modes;
  Tensors lrs;  // only of groups whose lr lies on a device
};
using StepArguments = StepLists<at::TensorList, at::IntArrayRef, at::ArrayRef<double>>;
using PackedStep = StepLists<std::vector<at::Tensor>, std::vector<int64_t>, std::vector<double>>;

PackedStep pack(c10::ArrayRef<Parameter*> parameters);

struct Unpacked {
  std::vector<Group> groups;
  std::vector<Parameter> parameters;  // `local` is set, `tensor` is not
};

// Throws where the lists are inconsistent.
Unpacked unpack(const StepArguments& of);

}  // namespace memsave_ext::adam
