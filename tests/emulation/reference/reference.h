// What the emulated kernels are compared with.
#pragma once

#include "adam/kernels.h"

#define EMULATION_EXPORT __attribute__((visibility("default")))

namespace emulation {

EMULATION_EXPORT const memsave_ext::adam::Kernels& adam_on_cpu();

}  // namespace emulation
