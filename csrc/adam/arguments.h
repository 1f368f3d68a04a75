// Parameters as the arguments of the operator that steps them, and back. Parameters of several
// groups and formats are one call; a tensor that one of them has and another has not is in a list
// once. Schema: memsave_ext/_ops.py.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/ArrayRef.h>

#include <optional>
#include <vector>

#include "adam/parameter.h"

namespace memsave_ext::adam {

// memsave_ext::adam_step_, as C++ sees it.
using StepOperator = void(at::TensorList params, at::TensorList grads, at::TensorList states,
                          at::IntArrayRef present, at::IntArrayRef phases,
                          at::IntArrayRef positions, at::IntArrayRef groups,
                          at::ArrayRef<double> options, at::IntArrayRef modes, at::TensorList lrs,
                          const std::optional<at::Tensor>& loss_scale,
                          const std::optional<at::Tensor>& found,
                          const std::optional<at::Tensor>& factor,
                          const std::optional<at::Tensor>& skip);

// Its lists, those of parameters first.
template <typename Tensors, typename Ints, typename Doubles>
struct StepLists {
  Tensors params, grads, states;
  // Of each parameter: which tensors it has, bit 0 for the gradient and the others for its states
  // in the order of kStateNames; its phase; its position in the optimizer; and its group here.
  Ints present, phases, positions, groups;
  // Of each group, in the order in which arguments.cpp names them.
  Doubles options;
  Ints modes;
  Tensors lrs;  // those that lie on a device
};
using StepArguments = StepLists<at::TensorList, at::IntArrayRef, at::ArrayRef<double>>;
using PackedStep = StepLists<std::vector<at::Tensor>, std::vector<int64_t>, std::vector<double>>;

PackedStep pack(c10::ArrayRef<Parameter*> parameters);

struct Unpacked {
  std::vector<Group> groups;
  std::vector<Parameter> parameters;  // `local`, not `tensor`
};

// Throws where the lists do not fit together.
Unpacked unpack(const StepArguments& of);

}  // namespace memsave_ext::adam
