#include "adam/state.h"

#include <algorithm>
#include <vector>

#include "adam/errors.h"
#include "adam/format_names.h"
#include "vector/dtype.h"

namespace memsave_ext::adam {

using at::Tensor;

namespace {

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
void check_moments(const char* name, at::ScalarType moments, const Tensor& param,
                   const Group& group) {
  const auto type = c10::toRealValueType(param.scalar_type());
  std::vector<at::ScalarType> allowed = {param.scalar_type()};
  for (int i = 0; i < kStateFormats; ++i) {
    const StateRow& other = kStateRows[i];
    if (param.is_complex() || other.moments == Element::kNone) continue;
    const bool fits = takes(*vector::dtype_of(type), StateFormat{i});
    const bool chosen = !other.at_random || StateFormat{i} == group.state_dtype;
    const bool listed = scalar_type(other.moments) == allowed.back();  // as another's
    if (fits && chosen && !listed && scalar_type(other.moments) != type) {
      allowed.push_back(scalar_type(other.moments));
    }
  }
  if (std::find(allowed.begin(), allowed.end(), moments) == allowed.end()) {
    throw_error("wrong_moments", name, param.scalar_type(), moments, allowed);
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

// Throws where the moments, or their scales, are not such as kernels take.
void check_format(const Tensor& param, const State& state, const Group& group) {
  const RuleRow& rule = row(group.options.rule);
  const bool is_buffer = group.options.rule == Rule::kMomentum;
  const char* const name = is_buffer ? "momentum_buffer" : "exp_avg";
  if (!state.first().defined()) throw_error("no_state", name);
  const auto moments = state.first().scalar_type();
  if (moments != param.scalar_type()) check_moments(name, moments, param, group);
  const StateFormat format = state_format(param, state, group);
  if (is_joint(format)) {
    check_tensor("moments", state.moments, param, moments);
  } else {
    check_tensor(name, is_buffer ? state.momentum_buffer : state.exp_avg, param, moments);
    if (rule.moments > 1) check_tensor("exp_avg_sq", state.exp_avg_sq, param, moments);
  }
  if (rule.moments > 2) {
    if (!row(format).amsgrad) throw_error("no_amsgrad");
    check_tensor("max_exp_avg_sq", state.max_exp_avg_sq, param, moments);
  }
  if (!in_blocks(format)) return;
  check_scale(is_buffer ? "momentum_buffer_scale" : "exp_avg_scale", state.first_scale(), param,
              format);
  if (rule.moments > 1) {
    check_scale("exp_avg_sq_scale", state.exp_avg_sq_scale, param, format);
  }
  // Blocks are consecutive in memory, so all must have the same element order.
  if (!in_same_order(state.first(), param) ||
      (state.exp_avg_sq.defined() && !in_same_order(state.exp_avg_sq, param))) {
    throw_error("moved_blocks", state.first().strides(), param.strides());
  }
}

// Whether a step cannot be made without its number: Adam corrects by it, random bits depend on it.
bool needs_step(const Tensor& param, const Group& group, StateFormat states) {
  const RuleRow& rule = row(group.options.rule);
  return is_adam(group.options.rule) || row(param_format(param, group)).at_random ||
         (rule.moments > 0 && (row(states).at_random || in_blocks(states)));
}

}  // namespace

bool is_complete(const Tensor& param, const State& state, const Group& group) {
  const RuleRow& rule = row(group.options.rule);
  if (state.defined()) return group.options.rule != Rule::kMomentum || state.first().defined();
  return rule.moments == 0 && !needs_step(param, group, StateFormat::kAsParam) &&
         row(param_format(param, group)).low_part == Element::kNone;
}

ParamFormat param_format(const Tensor& param, const Group& group) {
  return param.scalar_type() == at::kBFloat16 ? group.bf16 : ParamFormat::kPlain;
}

StateFormat state_format(const Tensor& param, const State& state, const Group& group) {
  if (row(group.options.rule).moments == 0) return StateFormat::kAsParam;
  const auto type = c10::toRealValueType(state.first().scalar_type());
  for (int i = 0; i < kStateFormats; ++i) {
    const StateFormat made{i};
    if (!row(made).is_option || type != scalar_type(row(made).moments)) continue;
    if (is_joint(made) != state.moments.defined()) continue;
    // bfloat16 without state_dtype= is the parameter's own type, rounded to nearest.
    if (!row(made).at_random || made == group.state_dtype) return made;
  }
  return type == c10::toRealValueType(param.scalar_type()) ? StateFormat::kAsParam
                                                           : StateFormat::kFloat;
}

void check_state(const Tensor& param, const State& state, const Group& group) {
  const auto type = c10::toRealValueType(param.scalar_type());
  if (!vector::dtype_of(type)) throw_error("wrong_type", param.scalar_type());
  const RuleRow& rule = row(group.options.rule);
  if (rule.moments > 0) check_format(param, state, group);
  const StateFormat stored = state_format(param, state, group);
  if (state.step.defined() || needs_step(param, group, stored)) {
    check_step(state.step, param);
  }
  if (const Element low_part = row(param_format(param, group)).low_part;
      low_part != Element::kNone) {
    check_tensor("param_rest", state.param_low_part, param, scalar_type(low_part));
  }
  const Combination combination = {*vector::dtype_of(type), param_format(param, group), stored,
                                   group.options.rule, false};
  TORCH_CHECK(combination.exists(), "memsave_ext: no kernel steps a ", param.scalar_type(),
              " parameter with such states by ", rule.name);
}

using at::Tensor;

namespace {

void check_memory(const char* name, const Tensor& tensor) {
  const auto* storage = tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl();
  if (storage != nullptr && storage->data() != nullptr) return;
  if (tensor.numel() == 0 || tensor._is_zerotensor()) return;
  // Meta and fake tensors pass: no kernel reads their memory.
  TORCH_CHECK(storage != nullptr && storage->device().is_meta(), "memsave_ext: ", name,
              " is a tensor subclass without memory of its own, which kernels cannot step. Use "
              "torch's optimizer for it.");
}

void check_grad(const Tensor& grad, const Tensor& param, const Group& group) {
  check_dense(grad, group.options.rule);
  if (grad.sizes() != param.sizes() || grad.device() != param.device() ||
      grad.scalar_type() != param.scalar_type()) {
    throw_error("wrong_gradient", param, grad);
  }
  check_memory("a gradient", grad);
}

}  // namespace

void check_device(c10::Device device) {
#ifdef MEMSAVE_EXT_WITH_CUDA
  if (device.is_cuda()) return;
#endif
  TORCH_CHECK(device.is_cpu() || device.is_meta(),
              "memsave_ext: this build of memsave_ext has no kernel for ", device.type(),
              " (python -m memsave_ext.report says what was built). Use torch's optimizer there.");
}

void check_dense(const Tensor& grad, Rule rule) {
  if (grad.layout() != at::kStrided) throw_error("sparse", row(rule).name);
}

void check_step(const Tensor& param, const Tensor& grad, const State& state, const Group& group,
                StepPhase phase) {
  check_memory("a parameter", param);
  if (grad.defined()) check_grad(grad, param, group);
  check_state(param, state, group);
  if (phase == StepPhase::kWhole) return;
  const auto moments = state.first().scalar_type();
  const auto type = c10::toRealValueType(moments);
  if (type != at::kFloat && type != at::kDouble) throw_error("cannot_fold", moments);
}

}  // namespace memsave_ext::adam
