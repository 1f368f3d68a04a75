// Steps of 16-bit parameters with float states.
#include "adam/cuda/step.cuh"

namespace memsave_ext::adam {

template <>
const StepKernels& steps_with<StateFormat::kFloat>() {
  static const StepKernels kernels = step_kernels<StateFormat::kFloat>();
  return kernels;
}

}  // namespace memsave_ext::adam
