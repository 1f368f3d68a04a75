// Steps with bfloat16 states, rounded at random.
#include "adam/cuda/step.cuh"

namespace memsave_ext::adam {

template <>
const StepKernels& steps_with<StateFormat::kBFloat16>() {
  static const StepKernels kernels = step_kernels<StateFormat::kBFloat16>();
  return kernels;
}

}  // namespace memsave_ext::adam
