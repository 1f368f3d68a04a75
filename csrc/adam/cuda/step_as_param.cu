// Steps with states of the parameter's type.
#include "adam/cuda/step.cuh"

namespace memsave_ext::adam {

extern const StepKernels steps_as_param = step_kernels<StateFormat::kAsParam>();

}  // namespace memsave_ext::adam
