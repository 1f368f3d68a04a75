#include "adam/state.h"

#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <array>
#include <iterator>

#include "adam/errors.h"
#include "adam/names.h"
#include "adam/tensors.h"
#include "vector/dtype.h"

namespace memsave_ext::adam {

namespace py = pybind11;
using at::Tensor;

namespace {

// Returns the names of kStateNames, interned: a look-up neither makes, hashes nor compares strings.
const std::array<PyObject*, std::size(kStateNames)>& keys() {
  static const auto of_names = [] {
    std::array<PyObject*, std::size(kStateNames)> made{};
    for (size_t i = 0; i < made.size(); ++i) {
      made[i] = PyUnicode_InternFromString(kStateNames[i].name);
    }
    return made;
  }();
  return of_names;
}

// Returns the index of a key in keys(), or their number where it is not there. Most often it is
// `guess`.
size_t place_of(PyObject* key, size_t guess) {
  const auto& names = keys();
  if (guess < names.size() && key == names[guess]) return guess;
  return std::find_if(names.begin(), names.end(),
                      [&](PyObject* name) {
                        return key == name ||
                               (PyUnicode_Check(key) && PyUnicode_Compare(key, name) == 0);
                      }) -
         names.begin();
}

void check_memory(const char* name, const Tensor& tensor) {
  const auto* storage = tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl();
  if (storage != nullptr && storage->data() != nullptr) return;
  if (tensor.numel() == 0 || tensor._is_zerotensor()) return;
  // Meta and fake tensors pass: no kernel reads their memory.
  TORCH_CHECK(storage != nullptr && storage->device().is_meta(), "memsave_ext: ", name,
              " is a tensor subclass without memory of its own, which kernels cannot step. Use "
              "torch's optimizer for it.");
}

// Whether a step can have a state: one that lies elsewhere can be fetched from the host.
bool is_reachable(const Tensor& param, const Tensor& state, const Group& group) {
  return state.device() == param.device() || (group.place && state.device().is_cpu());
}

bool is_like(const Tensor& param, const Tensor& tensor, at::ScalarType type) {
  return tensor.defined() && tensor.device() == param.device() && tensor.sizes() == param.sizes() &&
         tensor.scalar_type() == type;
}

bool is_state_of(const Tensor& param, const Tensor& state, at::ScalarType type,
                 const Group& group) {
  return state.defined() && is_reachable(param, state, group) && state.sizes() == param.sizes() &&
         state.scalar_type() == type;
}

bool is_step(const Tensor& param, const Tensor& step) {
  if (step.numel() != 1) return false;
  if (step.scalar_type() == at::kDouble) return step.device().is_cpu();
  return step.scalar_type() == at::kFloat &&
         (step.device().is_cpu() || step.device() == param.device());
}

// Whether a step cannot be made without its number: Adam corrects by it, random bits depend on it.
bool needs_step(const Tensor& param, const Group& group, StateFormat states) {
  const Rule rule = group.options.rule;
  return is_adam(rule) || row(param_format(param, group)).at_random ||
         (row(rule).moments > 0 && (row(states).at_random || in_blocks(states)));
}

// Whether these are codes of the parameter's blocks, which are consecutive in memory: both must
// have the same element order. A shard's scales may be more than its blocks, and have a dimension
// for each of the parameter's then.
bool is_coded_like(const Tensor& param, const Tensor& codes, const Tensor& scale,
                   StateFormat states, const Group& group) {
  for (int64_t i = 0; codes.defined() && i < param.dim(); ++i) {
    if (param.size(i) > 1 && codes.stride(i) != param.stride(i)) return false;
  }
  const int64_t blocks = blocks_of(states, param.numel());
  return scale.defined() &&
         (scale.numel() == blocks || (scale.numel() > blocks && scale.dim() > 1)) &&
         scale.scalar_type() == at::kFloat && is_reachable(param, scale, group) &&
         scale.is_contiguous();
}

bool has_moments(const Tensor& param, const State& state, const Group& group, StateFormat states) {
  const Rule rule = group.options.rule;
  const int moments = row(rule).moments;
  const Element stored = row(states).moments;
  const auto type = stored == Element::kNone ? param.scalar_type() : scalar_type(stored);
  const Tensor& first = is_joint(states)          ? state.moments
                        : rule == Rule::kMomentum ? state.momentum_buffer
                                                  : state.exp_avg;
  if (!first.is_same(state.first()) || !is_state_of(param, first, type, group)) return false;
  const bool has_second = moments > 1 && !is_joint(states);
  if (has_second && !is_state_of(param, state.exp_avg_sq, type, group)) return false;
  if (moments > 2 && !is_state_of(param, state.max_exp_avg_sq, type, group)) return false;
  if (!in_blocks(states)) return true;
  return is_coded_like(param, first, state.first_scale(), states, group) &&
         (moments < 2 ||
          is_coded_like(param, state.exp_avg_sq, state.exp_avg_sq_scale, states, group));
}

}  // namespace

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

bool can_step(const Tensor& param, const Tensor& grad, const State& state, const Group& group) {
  const Rule rule = group.options.rule;
  check_memory("a parameter", param);
  if (grad.defined()) {
    check_dense(grad, rule);
    check_memory("a gradient", grad);
    if (!is_like(param, grad, param.scalar_type())) return false;
  }
  const auto dtype = vector::dtype_of(c10::toRealValueType(param.scalar_type()));
  const bool has_states = row(rule).moments > 0;
  if (!dtype || (has_states && !state.first().defined())) return false;
  const StateFormat states = state_format(param, state, group);
  const Combination made{*dtype, param_format(param, group), states, rule};
  const Element low_part = row(made.format).low_part;
  return made.exists() && (!param.is_complex() || states == StateFormat::kAsParam) &&
         (!has_states || has_moments(param, state, group, states)) &&
         (state.step.defined() ? is_step(param, state.step) : !needs_step(param, group, states)) &&
         (low_part == Element::kNone ||
          is_like(param, state.param_low_part, scalar_type(low_part)));
}

void throw_misfit(const Tensor& param, const Tensor& grad, const State& state, const Group& group) {
  const py::gil_scoped_acquire gil;
  const char* const rule = row(group.options.rule).name;
  registered("check_named")(wrapped(param), wrapped(grad), dict_of(state), rule,
                            row(group.bf16).name, row(group.state_dtype).name);
  TORCH_CHECK(false, "memsave_ext: no kernel steps a ", param.scalar_type(),
              " parameter with such states by ", rule);
}

py::dict dict_of(const State& state) {
  py::dict dict;
  for (const auto& [name, tensor] : kStateNames) {
    if ((state.*tensor).defined()) dict[name] = wrapped(state.*tensor);
  }
  return dict;
}

void read_state(PyObject* dict, State& state) {
  PyObject *key, *value;
  size_t next = 0;
  for (Py_ssize_t position = 0; PyDict_Next(dict, &position, &key, &value);) {
    const size_t place = place_of(key, next);
    if (place == keys().size() || !THPVariable_Check(value)) continue;
    state.*kStateNames[place].tensor = local_tensor(value);
    next = place + 1;
  }
}

void check_device(c10::Device device) {
#ifdef MEMSAVE_EXT_WITH_CUDA
  if (device.is_cuda()) return;
#endif
  TORCH_CHECK(
      device.is_cpu() || device.is_meta(),
      "memsave_ext: this build of memsave_ext has no kernel for ", device.type(),
      " (python -m memsave_ext.report says what was built). Use torch's optimizer there",
      device.is_cuda() ? ", or set MEMSAVE_EXT_DISABLE=adam.cuda for torch's operators." : ".");
}

void check_dense(const Tensor& grad, Rule rule) {
  if (grad.layout() != at::kStrided) throw_error("sparse", row(rule).name);
}

}  // namespace memsave_ext::adam
