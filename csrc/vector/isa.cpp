#include "vector/isa.h"

#include <ATen/Version.h>

#include <string>

namespace memsave_ext::vector {

// The one that torch chose, so that ATEN_CPU_CAPABILITY limits both.
Isa isa_of_this_cpu() {
  const std::string capability = at::get_cpu_capability();
  return capability == "AVX512" ? Isa::kAvx512 : capability == "AVX2" ? Isa::kAvx2 : Isa::kBaseline;
}

}  // namespace memsave_ext::vector
