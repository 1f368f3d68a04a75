// Steps with blockwise 4-bit states.
#include "adam/cuda/step_blocks.cuh"

namespace memsave_ext::adam {

template <>
const StepKernels& steps_with<StateFormat::k4Bit>() {
  static const StepKernels kernels = blocks_kernels<StateFormat::k4Bit>();
  return kernels;
}

}  // namespace memsave_ext::adam
