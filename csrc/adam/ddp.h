// DistributedDataParallel: what its communication hook, which has the GIL, asks of a stepper.
#pragma once

#include <ATen/core/Tensor.h>
#include <pybind11/pybind11.h>

#include <memory>

#include "compat.h"

namespace memsave_ext::adam {

class Backward;
class Stepper;

// Whether a reducer reduces the gradient that this node accumulates, found without Python.
bool is_reduced_by_ddp(const NodePtr& accumulator);

void hand_to_ddp(const Stepper& stepper, const pybind11::list& params, bool enabled);

// Before the reduction of these parameters' gradients. What it returns goes to step_reduced().
std::shared_ptr<Backward> begin_reduced(Stepper& stepper, const pybind11::list& params);

void step_reduced(const Stepper& stepper, const std::shared_ptr<Backward>& backward,
                  const pybind11::list& params, const pybind11::list& grads);

}  // namespace memsave_ext::adam
