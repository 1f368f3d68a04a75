// Steps with states of the parameter's type.
#include "adam/cuda/step.cuh"

namespace memsave_ext::adam {

template <>
const StepKernels& steps_with<StateFormat::kAsParam>() {
  static const StepKernels kernels = step_kernels<StateFormat::kAsParam>();
  return kernels;
}

}  // namespace memsave_ext::adam
