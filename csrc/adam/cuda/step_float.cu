// Steps of 16-bit parameters with float states.
#include "adam/cuda/step.cuh"

namespace memsave_ext::adam {
namespace {

template <typename Param, ParamFormat format>
StepKernel kernel_of(bool amsgrad) {
  return amsgrad ? step_kernel<Mode<Param, format, StateFormat::kFloat, true>>
                 : step_kernel<Mode<Param, format, StateFormat::kFloat, false>>;
}

}  // namespace

StepKernel step_float(DType param, ParamFormat format, bool amsgrad) {
  if (param == DType::kHalf && format == ParamFormat::kPlain) {
    return kernel_of<__half, ParamFormat::kPlain>(amsgrad);
  }
  if (param != DType::kBFloat16) return nullptr;
  switch (format) {
    case ParamFormat::kPlain:
      return kernel_of<__nv_bfloat16, ParamFormat::kPlain>(amsgrad);
    case ParamFormat::kStochastic:
      return kernel_of<__nv_bfloat16, ParamFormat::kStochastic>(amsgrad);
    case ParamFormat::kKahan:
      return kernel_of<__nv_bfloat16, ParamFormat::kKahan>(amsgrad);
    case ParamFormat::kSplit:
      return kernel_of<__nv_bfloat16, ParamFormat::kSplit>(amsgrad);
  }
  return nullptr;
}

}  // namespace memsave_ext::adam
