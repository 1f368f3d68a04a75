#include "batch_norm/arguments.h"

#include <ATen/core/stack.h>

#include <type_traits>

namespace memsave_ext::batch_norm {
namespace {

// Calls visit(name, member) for all members, always in the same order.
template <typename Members, typename Visit>
void for_members(Members& args, const Visit& visit) {
  visit("grad", args.grad);
  visit("input", args.input);
  visit("weight", args.weight);
  visit("bias", args.bias);
  visit("residual", args.residual);
  visit("statistics", args.statistics);
  visit("means", args.means);
  visit("running_mean", args.running_mean);
  visit("running_var", args.running_var);
  visit("training", args.training);
  visit("momentum", args.momentum);
  visit("eps", args.eps);
  visit("activation", args.activation);
  visit("negative_slope", args.negative_slope);
  visit("group", args.group);
  visit("output_mask", args.output_mask);
}

c10::IValue as_value(const at::Tensor& tensor) {
  return tensor.defined() ? c10::IValue(tensor) : c10::IValue();
}
template <typename T>
c10::IValue as_value(const T& value) {
  return value;
}

}  // namespace

Operator::Operator(const c10::OperatorHandle& handle)
    : handle_(handle), size_(handle.schema().arguments().size()) {
  Arguments names;
  for_members(names, [&](const char* name, const auto&) {
    places_.push_back(handle.schema().argumentIndexWithName(name).value_or(-1));
  });
}

Arguments Operator::read(const torch::jit::Stack& stack) const {
  Arguments arguments;
  auto place = places_.begin();
  for_members(arguments, [&](const char*, auto& member) {
    const int i = *place++;
    if (i < 0) return;
    const c10::IValue& value = torch::jit::peek(stack, i, size_);
    if (!value.isNone()) member = value.to<std::decay_t<decltype(member)>>();
  });
  return arguments;
}

std::vector<at::Tensor> Operator::operator()(const Arguments& arguments) const {
  torch::jit::Stack stack(size_);
  auto place = places_.begin();
  for_members(arguments, [&](const char*, const auto& member) {
    const int i = *place++;
    if (i >= 0) stack[i] = as_value(member);
  });
  handle_.callBoxed(stack);
  std::vector<at::Tensor> results;
  for (auto& value : stack) results.push_back(std::move(value).toTensor());
  return results;
}

}  // namespace memsave_ext::batch_norm
