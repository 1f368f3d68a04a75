// DistributedDataParallel: what its communication hook calls. The hook holds the GIL.
#pragma once

#include <ATen/core/Tensor.h>
#include <pybind11/pybind11.h>

#include <memory>

#include "compat.h"

namespace memsave_ext::adam {

class Backward;
class Stepper;

// Whether a DDP reducer reduces the gradient that this node accumulates. Does not call Python.
bool is_reduced_by_ddp(const NodePtr& accumulator);

// Notes, for each of these parameters that has a hook, whether DDP reduces its gradient.
void hand_to_ddp(const Stepper& stepper, const pybind11::list& params, bool enabled);

// Called before these parameters' gradients are reduced. Throws where they cannot be used then.
// Returns the backward to pass to step_reduced(); null where the gradients will be dropped, outside
// of a backward, and when the optimizer is gone.
std::shared_ptr<Backward> begin_reduced(Stepper& stepper, const pybind11::list& params);

// Applies the backward's action to the reduced gradients. Does nothing where `backward` is null.
void step_reduced(const Stepper& stepper, const std::shared_ptr<Backward>& backward,
                  const pybind11::list& params, const pybind11::list& grads);

}  // namespace memsave_ext::adam
