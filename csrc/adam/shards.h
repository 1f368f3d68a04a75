// Steps of DTensors whose shards must be scaled alike: clipped by the norm of all of them, or left
// out where any of them is not finite.
#pragma once

#include <c10/util/ArrayRef.h>

#include <vector>

#include "adam/dtensor.h"
#include "adam/items.h"
#include "adam/parameter.h"

namespace memsave_ext::adam {

// Whether the parameter's own max_grad_norm, or a loss scale, asks for the whole gradient of which
// this process has a shard. `scaled`: there is a loss scale.
bool asks_other_shards(const Parameter& parameter, bool scaled);

// Returns the parameters that ask, those together that one agree() can be for, and the others last.
// It is the same in all processes where the parameters are.
std::vector<std::vector<Parameter*>> parts_that_agree(c10::ArrayRef<Parameter*> parameters,
                                                      bool scaled);

// Returns the factors and skips of the gradients of one such part: one collective.
Scaling agree(c10::ArrayRef<Parameter*> parameters, const Scaling& scaling);

}  // namespace memsave_ext::adam
