#include "batch_norm/arguments.h"

#include <ATen/core/stack.h>

#include <type_traits>

namespace memsave_ext::batch_norm {
namespace {

// Calls visit(name, member) for all members, always in the same order.
template <typename Of, typename Visit>
void for_members(Of& of, const Visit& visit) {
  visit("grad", of.grad);
  visit("input", of.input);
  visit("weight", of.weight);
  visit("bias", of.bias);
  visit("residual", of.residual);
  visit("statistics", of.statistics);
  visit("means", of.means);
  visit("running_mean", of.running_mean);
  visit("running_var", of.running_var);
  visit("training", of.training);
  visit("momentum", of.momentum);
  visit("eps", of.eps);
  visit("activation", of.activation);
  visit("negative_slope", of.negative_slope);
  visit("group", of.group);
  visit("output_mask", of.output_mask);
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
