#include "adam/arguments.h"

#include <algorithm>
#include <array>
#include <iterator>

namespace memsave_ext::adam {

using at::Tensor;

namespace {

constexpr size_t kOptionsOfGroup = 6;
constexpr size_t kModesOfGroup = 8;

void pack_group(const Group& group, PackedStep& into) {
  const Options& o = group.options;
  into.options.insert(into.options.end(),
                      {o.lr, o.beta1, o.beta2, o.eps, o.weight_decay, group.max_grad_norm});
  into.modes.insert(into.modes.end(),
                    {static_cast<int64_t>(o.rule), o.decoupled_weight_decay, o.nesterov, o.maximize,
                     static_cast<int64_t>(group.bf16), static_cast<int64_t>(group.state_dtype),
                     static_cast<int64_t>(o.seed), group.lr.defined()});
  if (group.lr.defined()) into.lrs.push_back(group.lr);
}

Group unpack_group(const double* options, const int64_t* modes, const Tensor*& lr,
                   const Tensor* end_of_lrs) {
  const auto number = [](const char* of, int64_t value, int count) {
    TORCH_CHECK_VALUE(value >= 0 && value < count, "adam_step_: no ", of, " has the number ",
                      value);
    return value;
  };
  Group group;
  const auto rule = static_cast<Rule>(number("rule", modes[0], kRules));
  group.options = {
      options[0],    options[1],    options[2],    options[3], options[4],
      modes[1] != 0, modes[2] != 0, modes[3] != 0, rule,       static_cast<uint64_t>(modes[6])};
  group.max_grad_norm = options[5];
  group.bf16 = static_cast<ParamFormat>(number("format", modes[4], kParamFormats));
  group.state_dtype = static_cast<StateFormat>(number("format", modes[5], kStateFormats));
  if (modes[7] != 0) {
    TORCH_CHECK_VALUE(lr != end_of_lrs && !lr->is_cpu() && lr->scalar_type() == at::kFloat,
                      "adam_step_: lrs must have a float32 scalar on a device for each group whose "
                      "last mode is not 0");
    group.lr = *lr++;
  }
  return group;
}

void check_length(const char* name, size_t length, size_t expected) {
  TORCH_CHECK_VALUE(length == expected, "adam_step_: ", name, " must have ", expected,
                    " elements, got ", length);
}

}  // namespace

PackedStep pack(c10::ArrayRef<Parameter*> parameters) {
  PackedStep packed;
  std::vector<const Group*> groups;
  const size_t count = parameters.size();
  packed.params.reserve(count);
  packed.grads.reserve(count);
  packed.states.reserve(4 * count);
  for (auto* of : {&packed.present, &packed.phases, &packed.positions, &packed.groups}) {
    of->reserve(count);
  }
  for (const Parameter* parameter : parameters) {
    int64_t present = parameter->grad.defined();
    packed.params.push_back(parameter->local);
    if (present != 0) packed.grads.push_back(parameter->grad);
    for (size_t i = 0; i < std::size(kStateNames); ++i) {
      const Tensor& state = parameter->state.*kStateNames[i].tensor;
      if (!state.defined()) continue;
      present |= int64_t{2} << i;
      packed.states.push_back(state);
    }
    packed.present.push_back(present);
    packed.phases.push_back(static_cast<int64_t>(parameter->phase));
    packed.positions.push_back(parameter->position);
    const auto group = std::find(groups.begin(), groups.end(), parameter->group);
    packed.groups.push_back(group - groups.begin());
    if (group != groups.end()) continue;
    groups.push_back(parameter->group);
    pack_group(*parameter->group, packed);
  }
  return packed;
}

Unpacked unpack(const StepArguments& of) {
  const size_t count = of.params.size();
  const size_t groups = of.options.size() / kOptionsOfGroup;
  check_length("present", of.present.size(), count);
  check_length("phases", of.phases.size(), count);
  check_length("positions", of.positions.size(), count);
  check_length("groups", of.groups.size(), count);
  check_length("options", of.options.size(), groups * kOptionsOfGroup);
  check_length("modes", of.modes.size(), groups * kModesOfGroup);
  Unpacked unpacked;
  const Tensor* lr = of.lrs.begin();
  for (size_t i = 0; i < groups; ++i) {
    unpacked.groups.push_back(unpack_group(of.options.data() + i * kOptionsOfGroup,
                                           of.modes.data() + i * kModesOfGroup, lr, of.lrs.end()));
  }
  const Tensor *grad = of.grads.begin(), *state = of.states.begin();
  const auto next = [](const Tensor*& tensor, const Tensor* end, const char* list) {
    TORCH_CHECK_VALUE(tensor != end, "adam_step_: ", list, " has fewer tensors than present says");
    return *tensor++;
  };
  for (size_t i = 0; i < count; ++i) {
    Parameter& parameter = unpacked.parameters.emplace_back();
    const auto group = static_cast<size_t>(of.groups[i]);
    TORCH_CHECK_VALUE(group < groups, "adam_step_: there is no group ", of.groups[i]);
    TORCH_CHECK_VALUE(of.phases[i] >= 0 && of.phases[i] <= static_cast<int64_t>(StepPhase::kClose),
                      "adam_step_: there is no phase ", of.phases[i]);
    const RuleRow& rule = row(unpacked.groups[group].options.rule);
    TORCH_CHECK_VALUE(of.phases[i] == 0 || rule.folds, "adam_step_: nothing is folded by ",
                      rule.name);
    parameter.local = of.params[i];
    parameter.group = &unpacked.groups[group];
    parameter.phase = static_cast<StepPhase>(of.phases[i]);
    parameter.position = static_cast<uint32_t>(of.positions[i]);
    if ((of.present[i] & 1) != 0) parameter.grad = next(grad, of.grads.end(), "grads");
    for (size_t j = 0; j < std::size(kStateNames); ++j) {
      if ((of.present[i] >> (j + 1) & 1) == 0) continue;
      parameter.state.*kStateNames[j].tensor = next(state, of.states.end(), "states");
    }
  }
  TORCH_CHECK_VALUE(grad == of.grads.end() && state == of.states.end() && lr == of.lrs.end(),
                    "adam_step_: there are more tensors than present and modes say");
  return unpacked;
}

}  // namespace memsave_ext::adam
