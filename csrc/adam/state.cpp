#include "adam/state.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>

#include <algorithm>
#include <vector>

#include "adam/dtensor.h"
#include "adam/format_names.h"
#include "adam/given.h"
#include "vector/dtype.h"

namespace memsave_ext::adam {

using at::Tensor;

namespace {

// Returns the format of the state that make_state() makes.
StateFormat made_format(const Tensor& param, const Tensor& whole, const Group& group) {
  const auto size = [&] { return param.is_same(whole) ? param.numel() : largest_shard(whole); };
  const auto takes_blocks = [&] {
    return size() >= kSmallestOfBlocks && param.is_non_overlapping_and_dense();
  };
  const auto& asked = row(group.state_dtype);
  if (asked.option != Option::kNone && (!in_blocks(asked.format) || takes_blocks()))
    return asked.format;
  const auto dtype = vector::dtype_of(param.scalar_type());
  const bool takes_float = dtype && (row(StateFormat::kFloat).params & bit(*dtype)) != 0;
  return takes_float ? StateFormat::kFloat : StateFormat::kAsParam;
}

std::vector<int64_t> scale_shape(const Tensor& param, const Tensor& whole, StateFormat format) {
  if (!param.is_same(whole)) return local_scale_shape(whole, row(format).codes.block);
  return {blocks_of(format, param.numel())};
}

void check_tensor(const char* name, const Tensor& tensor, const Tensor& param,
                  at::ScalarType type) {
  if (!tensor.defined()) throw_error("no_state", name);
  if (tensor.device() != param.device() || tensor.sizes() != param.sizes()) {
    throw_error("wrong_place", name, tensor, param);
  }
  if (tensor.scalar_type() != type) {
    throw_error("wrong_state_type", name, tensor.scalar_type(), type);
  }
}

// Returns whether the strides are the same, except in dimensions of size 1.
bool in_same_order(const Tensor& a, const Tensor& b) {
  for (int64_t i = 0; i < a.dim(); ++i) {
    if (a.size(i) > 1 && a.stride(i) != b.stride(i)) return false;
  }
  return true;
}

// Throws where moments of this type, which is not the parameter's, do not fit it.
void check_moments(at::ScalarType moments, const Tensor& param, const Group& group) {
  const auto type = c10::toRealValueType(param.scalar_type());
  std::vector<at::ScalarType> allowed = {param.scalar_type()};
  for (const StateRow& other : kStateRows) {
    if (param.is_complex() || other.moments == Element::kNone) continue;
    const bool fits = (other.params & bit(*vector::dtype_of(type))) != 0;
    const bool chosen = !other.at_random || other.format == group.state_dtype;
    const bool listed = scalar_type(other.moments) == allowed.back();  // as another's
    if (fits && chosen && !listed && scalar_type(other.moments) != type) {
      allowed.push_back(scalar_type(other.moments));
    }
  }
  if (std::find(allowed.begin(), allowed.end(), moments) == allowed.end()) {
    throw_error("wrong_moments", param.scalar_type(), moments, allowed);
  }
}

void check_step(const Tensor& step, const Tensor& param) {
  const bool fits = step.defined() && step.numel() == 1 &&
                    (step.device().is_cpu()
                         ? step.scalar_type() == at::kFloat || step.scalar_type() == at::kDouble
                         : step.device() == param.device() && step.scalar_type() == at::kFloat);
  if (!fits) throw_error("wrong_step");
}

void check_scale(const char* name, const Tensor& scale, const Tensor& param, StateFormat format) {
  const int64_t blocks = blocks_of(format, param.numel());
  const int64_t found = scale.defined() ? scale.numel() : -1;
  // A shard's scales may be more, and have a dimension for each of the parameter's then.
  if (found < blocks || (found > blocks && scale.dim() < 2) || scale.scalar_type() != at::kFloat ||
      scale.device() != param.device() || !scale.is_contiguous()) {
    throw_error("wrong_scale", name, param, blocks);
  }
}

}  // namespace

State make_state(const Tensor& param, const Tensor& whole, const Group& group) {
  const at::NoGradGuard no_grad;
  const auto zeros = [&](at::ScalarType of_type) {
    return at::zeros_like(param, param.options().dtype(of_type), at::MemoryFormat::Preserve);
  };
  const auto step_device = group.step_on_device ? param.device() : c10::Device(c10::kCPU);
  State state;
  state.step = at::zeros({}, at::TensorOptions().dtype(at::kFloat).device(step_device));
  const StateRow& made = row(made_format(param, whole, group));
  const auto moments =
      made.moments == Element::kNone ? param.scalar_type() : scalar_type(made.moments);
  if (in_blocks(made.format)) {
    const auto scales = [&] {
      return at::zeros(scale_shape(param, whole, made.format), param.options().dtype(at::kFloat));
    };
    state.exp_avg_scale = scales();
    state.exp_avg_sq_scale = scales();
  }
  if (is_joint(made.format)) {
    state.moments = zeros(moments);
  } else {
    state.exp_avg = zeros(moments);
    state.exp_avg_sq = zeros(moments);
  }
  if (group.options.amsgrad) state.max_exp_avg_sq = zeros(moments);
  if (const Element low_part = row(param_format(param, group)).low_part;
      low_part != Element::kNone) {
    state.param_low_part = zeros(scalar_type(low_part));
  }
  return state;
}

ParamFormat param_format(const Tensor& param, const Group& group) {
  return param.scalar_type() == at::kBFloat16 ? group.bf16 : ParamFormat::kPlain;
}

StateFormat state_format(const Tensor& param, const State& state, const Group& group) {
  const auto type = c10::toRealValueType(state.first().scalar_type());
  for (const StateRow& made : kStateRows) {
    if (made.option == Option::kNone || type != scalar_type(made.moments)) continue;
    if (is_joint(made.format) != state.moments.defined()) continue;
    // bfloat16 without state_dtype= is the parameter's own type, rounded to nearest.
    if (!made.at_random || made.format == group.state_dtype) return made.format;
  }
  return type == c10::toRealValueType(param.scalar_type()) ? StateFormat::kAsParam
                                                           : StateFormat::kFloat;
}

void check_state(const Tensor& param, const State& state, const Group& group) {
  const auto type = c10::toRealValueType(param.scalar_type());
  if (!vector::dtype_of(type)) throw_error("wrong_type", param.scalar_type());
  check_step(state.step, param);
  if (!state.first().defined()) throw_error("no_state", "exp_avg");
  const auto moments = state.first().scalar_type();
  if (moments != param.scalar_type()) check_moments(moments, param, group);
  const StateRow& stored = row(state_format(param, state, group));
  if (is_joint(stored.format)) {
    check_tensor("moments", state.moments, param, moments);
  } else {
    check_tensor("exp_avg", state.exp_avg, param, moments);
    check_tensor("exp_avg_sq", state.exp_avg_sq, param, moments);
  }
  if (group.options.amsgrad) {
    if (!stored.amsgrad) throw_error("no_amsgrad");
    check_tensor("max_exp_avg_sq", state.max_exp_avg_sq, param, moments);
  }
  if (in_blocks(stored.format)) {
    check_scale("exp_avg_scale", state.exp_avg_scale, param, stored.format);
    check_scale("exp_avg_sq_scale", state.exp_avg_sq_scale, param, stored.format);
    // Blocks are consecutive in memory, so both must have the same element order.
    if (!in_same_order(state.first(), param) ||
        (state.exp_avg_sq.defined() && !in_same_order(state.exp_avg_sq, param))) {
      throw_error("moved_blocks", state.first().strides(), param.strides());
    }
  }
  if (const Element low_part = row(param_format(param, group)).low_part;
      low_part != Element::kNone) {
    check_tensor("param_rest", state.param_low_part, param, scalar_type(low_part));
  }
  const Combination combination = {*vector::dtype_of(type), param_format(param, group),
                                   stored.format, group.options.amsgrad, false};
  TORCH_CHECK(combination.exists(), "Adam: no kernel steps a ", param.scalar_type(),
              " parameter with states of ", moments);
}

}  // namespace memsave_ext::adam
