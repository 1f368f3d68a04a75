// Steps with bfloat16 states, rounded at random.
#include "adam/cuda/step.cuh"

namespace memsave_ext::adam {
namespace {

template <typename Param, ParamFormat format>
StepKernel kernel_of(bool amsgrad) {
  return amsgrad ? step_kernel<Mode<Param, format, StateFormat::kBFloat16, true>>
                 : step_kernel<Mode<Param, format, StateFormat::kBFloat16, false>>;
}

}  // namespace

StepKernel step_bfloat16(DType param, ParamFormat format, bool amsgrad) {
  if (format == ParamFormat::kPlain) {
    switch (param) {
      case DType::kDouble:
        return nullptr;
      case DType::kFloat:
        return kernel_of<float, ParamFormat::kPlain>(amsgrad);
      case DType::kHalf:
        return kernel_of<__half, ParamFormat::kPlain>(amsgrad);
      case DType::kBFloat16:
        return kernel_of<__nv_bfloat16, ParamFormat::kPlain>(amsgrad);
    }
  }
  if (param != DType::kBFloat16) return nullptr;
  switch (format) {
    case ParamFormat::kPlain:
      return nullptr;
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
