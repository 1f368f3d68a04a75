// measure() and measure_workspace() of kernels.h, on CPUs.
#pragma once

#include "adam/kernels.h"

namespace memsave_ext::adam::cpu {

void measure(const Item* items, int64_t count, const Measure& measure, void* workspace, void*);
int64_t measure_workspace(const Item* items, int64_t count);

}  // namespace memsave_ext::adam::cpu
