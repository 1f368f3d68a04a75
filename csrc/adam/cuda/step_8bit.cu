// Steps with blockwise 8-bit states.
#include "adam/cuda/step_blocks.cuh"

namespace memsave_ext::adam {

template <>
const StepKernels& steps_with<StateFormat::k8Bit>() {
  static const StepKernels kernels = blocks_kernels<StateFormat::k8Bit>();
  return kernels;
}

}  // namespace memsave_ext::adam
