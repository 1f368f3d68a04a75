#include "adam/state.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>

#include <algorithm>
#include <vector>

#include "adam/format_names.h"
#include "vector/dtype.h"

namespace memsave_ext::adam {

using at::Tensor;

namespace {

// Of the states that are made for a parameter.
StateFormat made_format(const Tensor& param, const Group& group) {
  const bool takes_blocks =
      param.numel() >= kSmallestOfBlocks && param.is_non_overlapping_and_dense();
  const auto& asked = row(group.state_dtype);
  if (asked.option != Option::kNone && (asked.block == 0 || takes_blocks)) return asked.format;
  const auto type = param.scalar_type();
  return type == at::kHalf || type == at::kBFloat16 ? StateFormat::kFloat : StateFormat::kAsParam;
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
  const auto zeros = [&](at::ScalarType of_type) {
    return at::zeros_like(param, param.options().dtype(of_type), at::MemoryFormat::Preserve);
  };
  const auto step_device = group.step_on_device ? param.device() : c10::Device(c10::kCPU);
  State state;
  state.step = at::zeros({}, at::TensorOptions().dtype(at::kFloat).device(step_device));
  const StateRow& made = row(made_format(param, group));
  const auto moments =
      made.moments == Element::kNone ? param.scalar_type() : scalar_type(made.moments);
  if (made.block > 0) {
    const auto scales = [&] {
      return at::zeros({blocks_of(param.numel())}, param.options().dtype(at::kFloat));
    };
    state.exp_avg_scale = scales();
    state.exp_avg_sq_scale = scales();
  }
  state.exp_avg = zeros(moments);
  state.exp_avg_sq = zeros(moments);
  if (group.options.amsgrad) state.max_exp_avg_sq = zeros(moments);
  if (const Element rest = row(param_format(param, group)).rest; rest != Element::kNone) {
    state.param_rest = zeros(scalar_type(rest));
  }
  return state;
}

ParamFormat param_format(const Tensor& param, const Group& group) {
  return param.scalar_type() == at::kBFloat16 ? group.bf16 : ParamFormat::kPlain;
}

StateFormat state_format(const Tensor& param, const State& state, const Group& group) {
  const auto type = c10::toRealValueType(state.exp_avg.scalar_type());
  for (const StateRow& made : kStateRows) {
    if (made.option == Option::kNone || type != scalar_type(made.moments)) continue;
    // Without the option it is the parameter's own type, rounded to nearest.
    if (!made.at_random || made.format == group.state_dtype) return made.format;
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
  for (const StateRow& other : kStateRows) {
    if (param.is_complex() || other.moments == Element::kNone) continue;
    const bool fits = (other.params & bit(*vector::dtype_of(type))) != 0;
    const bool chosen = !other.at_random || other.format == group.state_dtype;
    if (fits && chosen && scalar_type(other.moments) != type) {
      allowed.push_back(scalar_type(other.moments));
    }
  }
  TORCH_CHECK(std::find(allowed.begin(), allowed.end(), moments) != allowed.end(),
              "Adam: the state exp_avg of a ", param.scalar_type(), " parameter must be ",
              c10::Join(" or ", allowed), ", got ", moments,
              ". Convert the model before making the optimizer, or load the optimizer's "
              "state_dict() into it again.");
  const StateRow& stored = row(state_format(param, state, group));
  check_tensor("exp_avg", state.exp_avg, param, moments);
  check_tensor("exp_avg_sq", state.exp_avg_sq, param, moments);
  if (group.options.amsgrad) {
    TORCH_CHECK(stored.amsgrad, "Adam: 8-bit states cannot have amsgrad");
    check_tensor("max_exp_avg_sq", state.max_exp_avg_sq, param, moments);
  }
  if (stored.block > 0) {
    check_scale("exp_avg_scale", state.exp_avg_scale, param);
    check_scale("exp_avg_sq_scale", state.exp_avg_sq_scale, param);
    // Blocks follow memory.
    TORCH_CHECK(in_same_order(state.exp_avg, param) && in_same_order(state.exp_avg_sq, param),
                "Adam: 8-bit states need a parameter in the memory format it had when they were "
                "made: strides ",
                state.exp_avg.strides(), " then, ", param.strides(),
                " now. Load to_fp32_state_dict() into a new optimizer.");
  }
  if (const Element rest = row(param_format(param, group)).rest; rest != Element::kNone) {
    check_tensor("param_rest", state.param_rest, param, scalar_type(rest));
  }
  const Combination combination = {*vector::dtype_of(type), param_format(param, group),
                                   stored.format, group.options.amsgrad, false};
  TORCH_CHECK(combination.exists(), "Adam: no kernel steps a ", param.scalar_type(),
              " parameter with states of ", moments);
}

}  // namespace memsave_ext::adam
