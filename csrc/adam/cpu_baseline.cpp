// The steps for any CPU.
#include "vector/target_baseline.h"
//
#include "adam/cpu_vector_step.h"

namespace memsave_ext::adam::cpu {

const StepTable& baseline_steps = baseline::kSteps;

}  // namespace memsave_ext::adam::cpu
