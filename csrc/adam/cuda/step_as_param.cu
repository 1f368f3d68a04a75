// Steps with states of the parameter's type.
#include "adam/cuda/step.cuh"

namespace memsave_ext::adam {
namespace {

template <typename Param>
StepKernel kernel_of(bool amsgrad) {
  return amsgrad ? step_kernel<Mode<Param, ParamFormat::kPlain, StateFormat::kAsParam, true>>
                 : step_kernel<Mode<Param, ParamFormat::kPlain, StateFormat::kAsParam, false>>;
}

}  // namespace

StepKernel step_as_param(DType param, ParamFormat format, bool amsgrad) {
  if (format != ParamFormat::kPlain) return nullptr;
  switch (param) {
    case DType::kDouble:
      return kernel_of<double>(amsgrad);
    case DType::kFloat:
      return kernel_of<float>(amsgrad);
    case DType::kHalf:
      return kernel_of<__half>(amsgrad);
    case DType::kBFloat16:
      return kernel_of<__nv_bfloat16>(amsgrad);
  }
  return nullptr;
}

}  // namespace memsave_ext::adam
