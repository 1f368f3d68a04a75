// Steps with bfloat16 states, rounded at random.
#include "adam/cuda/step.cuh"

namespace memsave_ext::adam {

extern const StepKernels steps_bfloat16 = step_kernels<StateFormat::kBFloat16>();

}  // namespace memsave_ext::adam
