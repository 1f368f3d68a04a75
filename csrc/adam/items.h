// Parameters as kernels take them: raw pointers, and the number of the step.
#pragma once

#include <c10/core/Device.h>

#include <vector>

#include "adam/kernels.h"
#include "adam/operands.h"
#include "adam/parameter.h"
#include "cuda_stream.h"

namespace memsave_ext::adam {

// Throws where this build has no kernels for a device.
const Kernels& kernels_for(c10::Device device);

// The parameter is prepared. Its item points to memory of the tensors, or of `operands`.
Item item_of(const Parameter& parameter, Operands& operands);

// Advances the step counts, except of folds, and sets in each item the number of the step it makes.
// On CPUs, removes the items that are skipped, and their parameters.
void advance_steps(std::vector<Item>& items, std::vector<Parameter*>& of_items,
                   const Kernels& kernels, bool on_cpu, void* stream);

}  // namespace memsave_ext::adam
