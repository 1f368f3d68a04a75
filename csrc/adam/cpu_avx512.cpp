// The steps for AVX512.
#if defined(__x86_64__)
#include "vector/target_avx512.h"
//
#include "adam/cpu_vector_step.h"
//
#include "vector/target_end.h"

namespace memsave_ext::adam::cpu {

const StepTable& avx512_steps = avx512::kSteps;

}  // namespace memsave_ext::adam::cpu
#endif
