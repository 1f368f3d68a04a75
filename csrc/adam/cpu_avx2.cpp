// The steps for AVX2.
#if defined(__x86_64__)
#include "vector/target_avx2.h"
//
#include "adam/cpu_vector_step.h"
//
#include "vector/target_end.h"

namespace memsave_ext::adam::cpu {

const StepTable& avx2_steps = avx2::kSteps;

}  // namespace memsave_ext::adam::cpu
#endif
