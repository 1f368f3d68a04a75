// Steps of 16-bit parameters with float states.
#include "adam/cuda/step.cuh"

namespace memsave_ext::adam {

extern const StepKernels steps_float = step_kernels<StateFormat::kFloat>();

}  // namespace memsave_ext::adam
