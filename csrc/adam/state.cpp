#include "adam/state.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>

#include <algorithm>
#include <vector>

#include "vector/dtype.h"

namespace memsave_ext::adam {

using at::Tensor;

namespace {

bool has_rest(ParamFormat format) {
  return format == ParamFormat::kKahan || format == ParamFormat::kSplit;
}

void check_tensor(const char* name, const Tensor& tensor, const Tensor& param,
                  at::ScalarType type) {
  TORCH_CHECK(tensor.defined(), "Adam: the state of a parameter has no ", name);
  TORCH_CHECK(tensor.device() == param.device() && tensor.sizes() == param.sizes(),
              "Adam: the state ", name, " of a parameter is a tensor of shape ", tensor.sizes(),
              " on ", tensor.device(), ", the parameter one of shape ", param.sizes(), " on ",
              param.device(),
              ". Move the model before making the optimizer, or load the optimizer's state_dict() "
              "into it again.");
  TORCH_CHECK(tensor.scalar_type() == type, "Adam: the state ", name, " of a parameter is ",
              tensor.scalar_type(), ", expected ", type);
}

// Whose elements follow each other alike.
bool in_same_order(const Tensor& a, const Tensor& b) {
  for (int64_t i = 0; i < a.dim(); ++i) {
    if (a.size(i) > 1 && a.stride(i) != b.stride(i)) return false;
  }
  return true;
}

void check_step(const Tensor& step, const Tensor& param) {
  TORCH_CHECK(step.defined() && step.numel() == 1 &&
                  (step.device().is_cpu()
                       ? step.scalar_type() == at::kFloat || step.scalar_type() == at::kDouble
                       : step.device() == param.device() && step.scalar_type() == at::kFloat),
              "Adam: the state step of a parameter must be a floating-point scalar tensor on the "
              "CPU, or float32 on the parameter's device");
}

void check_scale(const char* name, const Tensor& scale, const Tensor& param) {
  TORCH_CHECK(scale.defined() && scale.numel() == blocks_of(param.numel()) &&
                  scale.scalar_type() == at::kFloat && scale.device() == param.device() &&
                  scale.is_contiguous(),
              "Adam: the state ", name, " of a parameter of shape ", param.sizes(),
              " must be a contiguous float32 tensor of ", blocks_of(param.numel()),
              " elements on its device");
}

}  // namespace

State make_state(const Tensor& param, const Group& group) {
  const at::NoGradGuard no_grad;
  const auto type = param.scalar_type();
  const bool short_type = type == at::kHalf || type == at::kBFloat16;
  const auto zeros = [&](at::ScalarType of_type) {
    return at::zeros_like(param, param.options().dtype(of_type), at::MemoryFormat::Preserve);
  };
  const auto step_device = group.step_on_device ? param.device() : c10::Device(c10::kCPU);
  State state;
  state.step = at::zeros({}, at::TensorOptions().dtype(at::kFloat).device(step_device));
  auto moments = short_type ? at::kFloat : type;
  if (group.state_dtype == StateDtype::kBFloat16) moments = at::kBFloat16;
  if (group.state_dtype == StateDtype::kBlocks && param.numel() >= kSmallestOfBlocks &&
      param.is_non_overlapping_and_dense()) {
    moments = at::kByte;
    const auto scales = [&] {
      return at::zeros({blocks_of(param.numel())}, param.options().dtype(at::kFloat));
    };
    state.exp_avg_scale = scales();
    state.exp_avg_sq_scale = scales();
  }
  state.exp_avg = zeros(moments);
  state.exp_avg_sq = zeros(moments);
  if (group.options.amsgrad) state.max_exp_avg_sq = zeros(moments);
  if (const auto format = param_format(param, group); has_rest(format)) {
    state.param_rest = zeros(format == ParamFormat::kKahan ? at::kBFloat16 : at::kShort);
  }
  return state;
}

ParamFormat param_format(const Tensor& param, const Group& group) {
  return param.scalar_type() == at::kBFloat16 ? group.bf16 : ParamFormat::kPlain;
}

StateFormat state_format(const Tensor& param, const State& state, const Group& group) {
  const auto type = c10::toRealValueType(state.exp_avg.scalar_type());
  if (type == at::kByte) return StateFormat::kBlocks;
  if (type == at::kBFloat16 && group.state_dtype == StateDtype::kBFloat16) {
    return StateFormat::kBFloat16;
  }
  return type == c10::toRealValueType(param.scalar_type()) ? StateFormat::kAsParam
                                                           : StateFormat::kFloat;
}

void check_state(const Tensor& param, const State& state, const Group& group) {
  const auto type = c10::toRealValueType(param.scalar_type());
  TORCH_CHECK(vector::dtype_of(type), "Adam: parameters must be floating-point or complex, got ",
              param.scalar_type());
  check_step(state.step, param);
  TORCH_CHECK(state.exp_avg.defined(), "Adam: the state of a parameter has no exp_avg");
  const auto moments = state.exp_avg.scalar_type();
  std::vector<at::ScalarType> allowed = {param.scalar_type()};
  if (!param.is_complex() && type != at::kDouble) {
    if (type != at::kFloat) allowed.push_back(at::kFloat);
    if (group.state_dtype == StateDtype::kBFloat16 && type != at::kBFloat16) {
      allowed.push_back(at::kBFloat16);
    }
    allowed.push_back(at::kByte);  // with scales
  }
  TORCH_CHECK(std::find(allowed.begin(), allowed.end(), moments) != allowed.end(),
              "Adam: the state exp_avg of a ", param.scalar_type(), " parameter must be ",
              c10::Join(" or ", allowed), ", got ", moments,
              ". Convert the model before making the optimizer, or load the optimizer's "
              "state_dict() into it again.");
  check_tensor("exp_avg", state.exp_avg, param, moments);
  check_tensor("exp_avg_sq", state.exp_avg_sq, param, moments);
  if (group.options.amsgrad) {
    TORCH_CHECK(moments != at::kByte, "Adam: 8-bit states cannot have amsgrad");
    check_tensor("max_exp_avg_sq", state.max_exp_avg_sq, param, moments);
  }
  if (moments == at::kByte) {
    check_scale("exp_avg_scale", state.exp_avg_scale, param);
    check_scale("exp_avg_sq_scale", state.exp_avg_sq_scale, param);
    // Blocks follow memory.
    TORCH_CHECK(in_same_order(state.exp_avg, param) && in_same_order(state.exp_avg_sq, param),
                "Adam: 8-bit states need a parameter in the memory format it had when they were "
                "made: strides ",
                state.exp_avg.strides(), " then, ", param.strides(),
                " now. Load to_fp32_state_dict() into a new optimizer.");
  }
  if (const auto format = param_format(param, group); has_rest(format)) {
    check_tensor("param_rest", state.param_rest, param,
                 format == ParamFormat::kKahan ? at::kBFloat16 : at::kShort);
  }
}

}  // namespace memsave_ext::adam
