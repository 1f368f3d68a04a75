#pragma once

#include <c10/util/ArrayRef.h>
#include <torch/library.h>

#include "adam/factors.h"
#include "adam/parameter.h"

namespace memsave_ext::adam {

// The kernel of adam_step_. The parameters are checked and lie on one device.
void step_on_device(c10::ArrayRef<Parameter*> parameters, const Scaling& scaling);

void register_operators(torch::Library& library);

}  // namespace memsave_ext::adam
