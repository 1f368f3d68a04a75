#include "adam/ops.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/List.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/stack.h>
#include <ATen/record_function.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/library.h>

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "adam/names.h"
#include "adam/state.h"
#include "checkpoint/stepped.h"
#include "vector/dtype.h"

namespace memsave_ext::adam {

using at::Tensor;

namespace {

// Autograd has no part in a step: it is not differentiated, nor an in-place operation on a view.
using BelowAutograd = at::AutoDispatchBelowADInplaceOrView;

// Returns whether several of the parameters may have memory of one storage.
bool may_overlap(c10::ArrayRef<Parameter*> parameters) {
  if (parameters.size() < 2) return false;
  // A table by address, as a step of many small parameters would notice a slower way.
  size_t size = 4;
  while (size < 2 * parameters.size()) size *= 2;
  std::vector<const void*> seen(size, nullptr);
  for (const Parameter* parameter : parameters) {
    const void* const begin = parameter->local.storage().data();
    if (begin == nullptr) continue;
    size_t place = (reinterpret_cast<uintptr_t>(begin) >> 4) * 0x9e3779b97f4a7c15u >> 20;
    for (place &= size - 1; seen[place] != nullptr; place = (place + 1) & (size - 1)) {
      if (seen[place] == begin) return true;
    }
    seen[place] = begin;
  }
  return false;
}

// Returns how many parameters, from the first on, have no memory in common.
size_t count_apart(c10::ArrayRef<Parameter*> parameters) {
  std::map<const char*, const char*> ends;  // by where memory begins
  for (size_t i = 0; i < parameters.size(); ++i) {
    const Tensor& param = parameters[i]->local;
    if (param.numel() == 0) continue;
    int64_t span = 1;  // in elements; strides are never negative
    for (int64_t d = 0; d < param.dim(); ++d) span += (param.size(d) - 1) * param.stride(d);
    const auto* const begin = static_cast<const char*>(param.const_data_ptr());
    const char* const end = begin + span * static_cast<int64_t>(param.element_size());
    const auto next = ends.upper_bound(begin);
    if (next != ends.end() && next->first < end) return i;
    if (next != ends.begin() && std::prev(next)->second > begin) return i;
    ends.emplace(begin, end);
  }
  return parameters.size();
}

// The parameters have no memory in common, are checked and lie on one device.
void run_kernels_apart(c10::ArrayRef<Parameter*> parameters, const Scaling& scaling) {
  const auto device = parameters.front()->local.device();
  const auto& kernels = kernels_for(device);
  void* const stream = stream_of(device);
  const at::NoGradGuard no_grad;
  const c10::DeviceGuard on_device(device);

  Operands operands;
  std::vector<Item> items;
  std::vector<Parameter*> of_items = parameters.vec();
  items.reserve(parameters.size());
  for (const Parameter* parameter : parameters) items.push_back(item_of(*parameter, operands));
  Factors factors(kernels, device, stream);
  factors.find(items, parameters, scaling);
  advance_steps(items, of_items, device);
  kernels.step(items.data(), static_cast<int64_t>(items.size()), stream);
  operands.write_back();
  for (const Parameter* parameter : of_items) {
    if (parameter->local.is_inference()) continue;
    torch::autograd::impl::bump_version(parameter->local);
    checkpoint::note_step(parameter->local, parameter->position);
  }
}

// The kernel of adam_step_. The parameters are checked and lie on one device. Those that are tied,
// as by `a.data = b.data`, are stepped one after the other.
void run_kernels(c10::ArrayRef<Parameter*> parameters, const Scaling& scaling) {
  if (!may_overlap(parameters)) return run_kernels_apart(parameters, scaling);
  const auto count = static_cast<int64_t>(parameters.size());
  for (int64_t first = 0, apart; first < count; first += apart) {
    const auto left = parameters.slice(static_cast<size_t>(first));
    apart = static_cast<int64_t>(count_apart(left));
    const auto part_of = [&](const Tensor& of) {  // a scalar, or an element for each parameter
      return of.defined() && of.numel() == count ? of.narrow(0, first, apart) : of;
    };
    run_kernels_apart(
        left.slice(0, static_cast<size_t>(apart)),
        {scaling.grad_scale, scaling.found_inf, part_of(scaling.factor), part_of(scaling.skip)});
  }
}

// The operator's signature, and what it is given.
using StepOperator = void(at::TensorList params, at::TensorList grads, at::TensorList states,
                          at::IntArrayRef positions, c10::List<std::string> state_names,
                          std::string_view rule, double lr, const std::optional<Tensor>& tensor_lr,
                          double beta1, double beta2, double eps, double weight_decay,
                          bool decoupled_weight_decay, bool nesterov, bool maximize,
                          std::optional<std::string_view> bf16, std::string_view state_format,
                          int64_t seed, std::optional<double> max_grad_norm,
                          const std::optional<Tensor>& grad_scale,
                          const std::optional<Tensor>& found_inf,
                          const std::optional<Tensor>& factor, const std::optional<Tensor>& skip);

// `is_meta`: checks everything and does nothing.
template <bool is_meta>
void adam_step_(at::TensorList params, at::TensorList grads, at::TensorList states,
                at::IntArrayRef positions, c10::List<std::string> state_names,
                std::string_view rule, double lr, const std::optional<Tensor>& tensor_lr,
                double beta1, double beta2, double eps, double weight_decay,
                bool decoupled_weight_decay, bool nesterov, bool maximize,
                std::optional<std::string_view> bf16, std::string_view state_format, int64_t seed,
                std::optional<double> max_grad_norm, const std::optional<Tensor>& grad_scale,
                const std::optional<Tensor>& found_inf, const std::optional<Tensor>& factor,
                const std::optional<Tensor>& skip) {
  Group group;
  const auto of_rule = named<Rule>(kRuleRows, rule, "adam_step_: there is no rule");
  group.options = {lr,           beta1,
                   beta2,        eps,
                   weight_decay, decoupled_weight_decay,
                   nesterov,     maximize,
                   of_rule,      static_cast<uint64_t>(seed)};
  if (tensor_lr) group.lr = *tensor_lr;
  group.max_grad_norm = max_grad_norm.value_or(0);
  const char* const no_format = "adam_step_: there is no format";
  group.bf16 = named<ParamFormat>(kParamRows, bf16.value_or(""), no_format);
  group.state_dtype = named<StateFormat>(kStateRows, state_format, no_format);
  std::vector<Tensor State::*> of_names;
  for (const std::string& name : state_names.vec()) {
    const auto place = named<int>(kStateNames, name, "adam_step_: no state has the name");
    of_names.push_back(kStateNames[place].tensor);
  }
  const size_t count = params.size();
  const auto check_length = [](const char* name, size_t length, size_t expected) {
    TORCH_CHECK_VALUE(length == expected, "adam_step_: ", name, " must have ", expected,
                      " elements, got ", length);
  };
  check_length("grads", grads.size(), count);
  check_length("states", states.size(), count * of_names.size());
  check_length("positions", positions.size(), count);

  std::vector<Parameter> parameters(count);
  std::vector<Parameter*> pointers;
  for (size_t i = 0; i < count; ++i) {
    Parameter& parameter = parameters[i];
    pointers.push_back(&parameter);
    parameter.local = params[i];
    parameter.group = &group;
    parameter.position = static_cast<uint32_t>(positions[i]);
    parameter.grad = grads[i];
    for (size_t j = 0; j < of_names.size(); ++j) {
      parameter.state.*of_names[j] = states[i * of_names.size() + j];
    }
    // Symbolic sizes are of a trace: the kernel that runs later checks.
    if (is_meta && parameter.local.unsafeGetTensorImpl()->has_symbolic_sizes_strides()) continue;
    if (!can_step(parameter.local, parameter.grad, parameter.state, group)) {
      throw_misfit(parameter.local, parameter.grad, parameter.state, group);
    }
    TORCH_CHECK_VALUE(parameter.local.device() == params[0].device(),
                      "adam_step_: params must lie on one device, got ", params[0].device(),
                      " and ", parameter.local.device());
  }
  if (is_meta || parameters.empty()) return;
  run_kernels(pointers, {grad_scale.value_or(Tensor()), found_inf.value_or(Tensor()),
                         factor.value_or(Tensor()), skip.value_or(Tensor())});
}

// Calls the operator for parameters at these places, which are alike.
void call_operator(c10::ArrayRef<Parameter*> all, const std::vector<size_t>& places,
                   const Scaling& scaling) {
  static const auto step = c10::Dispatcher::singleton()
                               .findSchemaOrThrow("memsave_ext::adam_step_", "")
                               .typed<StepOperator>();
  const Parameter& first = *all[places.front()];
  std::vector<Tensor> params, grads, states;
  std::vector<int64_t> positions;
  c10::List<std::string> names;
  for (const auto& [name, tensor] : kStateNames) {
    if ((first.state.*tensor).defined()) names.push_back(name);
  }
  for (const size_t place : places) {
    const Parameter& parameter = *all[place];
    params.push_back(parameter.local);
    grads.push_back(parameter.grad);
    for (const auto& state : kStateNames) {
      const Tensor& tensor = parameter.state.*state.tensor;
      if (tensor.defined()) states.push_back(tensor);
    }
    positions.push_back(parameter.position);
  }
  const auto given = [](const Tensor& tensor) {
    return tensor.defined() ? std::optional(tensor) : std::nullopt;
  };
  const auto of_places = [&](const Tensor& of) {  // a scalar, or an element for each parameter
    if (!of.defined() || of.numel() == 1 || places.size() == all.size()) return given(of);
    std::vector<Tensor> elements;
    for (const size_t place : places) elements.push_back(of[static_cast<int64_t>(place)]);
    return given(at::stack(elements));
  };
  const Group& group = *first.group;
  const Options& o = group.options;
  const bool plain = group.bf16 == ParamFormat::kPlain;
  step.call(params, grads, states, positions, names, row(o.rule).name, o.lr, given(group.lr),
            o.beta1, o.beta2, o.eps, o.weight_decay, o.decoupled_weight_decay, o.nesterov,
            o.maximize,
            plain ? std::nullopt : std::optional<std::string_view>(row(group.bf16).name),
            row(group.state_dtype).name, static_cast<int64_t>(o.seed),
            group.max_grad_norm > 0 ? std::optional(group.max_grad_norm) : std::nullopt,
            given(scaling.grad_scale), given(scaling.found_inf), of_places(scaling.factor),
            of_places(scaling.skip));
}

// What the parameters of one call agree in: the group, and which states there are.
using Alike = std::pair<const Group*, uint32_t>;

Alike alike(const Parameter& parameter) {
  uint32_t states = 0;
  for (size_t i = 0; i < std::size(kStateNames); ++i) {
    if ((parameter.state.*kStateNames[i].tensor).defined()) states |= 1u << i;
  }
  return {parameter.group, states};
}

void call_operators(c10::ArrayRef<Parameter*> parameters, const Scaling& scaling) {
  std::vector<std::pair<Alike, std::vector<size_t>>> batches;
  for (size_t i = 0; i < parameters.size(); ++i) {
    const Alike key = alike(*parameters[i]);
    auto batch = std::find_if(batches.begin(), batches.end(),
                              [&](const auto& other) { return other.first == key; });
    if (batch == batches.end()) batch = batches.insert(batch, {key, {}});
    batch->second.push_back(i);
  }
  for (const auto& [key, places] : batches) call_operator(parameters, places, scaling);
}

// Returns whether the dispatcher would only call the kernel: nobody profiles either.
bool needs_no_dispatcher(c10::ArrayRef<Parameter*> parameters) {
  return std::all_of(parameters.begin(), parameters.end(),
                     [](const Parameter* parameter) { return needs_only_kernels(*parameter); }) &&
         !parameters.front()->local.is_meta() &&
         !at::getStepCallbacksUnlessEmpty(at::RecordScope::FUNCTION);
}

// The kernel of adam_sum_of_squares.
Tensor measure_squares(at::TensorList grads) {
  TORCH_CHECK_VALUE(!grads.empty(), "adam_sum_of_squares: grads is empty");
  const auto device = grads.front().device();
  const auto& kernels = kernels_for(device);
  const at::NoGradGuard no_grad;
  const c10::DeviceGuard on_device(device);
  Operands operands;
  std::vector<Item> items;
  for (const Tensor& grad : grads) {
    check_dense(grad);
    const Tensor like = layout_of(grad);
    Item item{};
    item.grad = operands.read(grad, like);
    item.numel = like.numel();
    item.param_type = real_dtype(grad.scalar_type());
    items.push_back(item);
  }
  const auto count = static_cast<int64_t>(items.size());
  const auto options = at::TensorOptions(device);
  const auto bytes = kernels.measure_workspace(items.data(), count);
  const Tensor workspace = at::empty({bytes}, options.dtype(at::kByte));
  const Tensor squares = at::empty({count}, options.dtype(at::kDouble));
  Measure measure{};
  measure.squares = squares.mutable_data_ptr<double>();
  kernels.measure(items.data(), count, measure, workspace.mutable_data_ptr(), stream_of(device));
  return squares.sum();
}

Tensor measure_on_meta(at::TensorList grads) {
  for (const Tensor& grad : grads) check_dense(grad);
  return at::empty({}, at::TensorOptions(at::kMeta).dtype(at::kDouble));
}

}  // namespace

bool needs_only_kernels(const Parameter& parameter) {
  const auto of_thread = c10::impl::tls_local_dispatch_key_set();
  c10::DispatchKeySet keys = of_thread.included_ | parameter.local.key_set();
  keys = keys | parameter.grad.key_set();
  for (const auto& state : kStateNames) keys = keys | (parameter.state.*state.tensor).key_set();
  constexpr c10::DispatchKeySet skipped({c10::DispatchKey::Dense, c10::DispatchKey::BackendSelect});
  const auto others = keys - of_thread.excluded_ - skipped;
  return (others.raw_repr() & ~c10::full_backend_mask) == 0;
}

void adam_step(c10::ArrayRef<Parameter*> parameters, const Scaling& scaling) {
  if (parameters.empty()) return;
  check_device(parameters.front()->local.device());
  const BelowAutograd guard;
  if (needs_no_dispatcher(parameters)) {
    run_kernels(parameters, scaling);
  } else {
    call_operators(parameters, scaling);
  }
}

Tensor adam_sum_of_squares(c10::ArrayRef<Tensor> grads) {
  check_device(grads.front().device());
  static const auto sum = c10::Dispatcher::singleton()
                              .findSchemaOrThrow("memsave_ext::adam_sum_of_squares", "")
                              .typed<Tensor(at::TensorList)>();
  const BelowAutograd guard;
  return sum.call(grads);
}

Combinations combinations() {
  Combinations all;
  for (int i = 0; i < kCombinations; ++i) {
    const Combination c = Combination::at(i);
    if (!c.exists()) continue;
    all.emplace_back(vector::scalar_type_of(c.param), row(c.format).name, row(c.states).name,
                     row(c.rule).name);
  }
  return all;
}

void register_operators(torch::Library& library) {
  library.impl("adam_step_", adam_step_<false>);
  library.impl("adam_sum_of_squares", measure_squares);
}

}  // namespace memsave_ext::adam

TORCH_LIBRARY_IMPL(memsave_ext, CPU, library) { memsave_ext::adam::register_operators(library); }

TORCH_LIBRARY_IMPL(memsave_ext, Meta, library) {
  library.impl("adam_step_", memsave_ext::adam::adam_step_<true>);
  library.impl("adam_sum_of_squares", memsave_ext::adam::measure_on_meta);
}
