// A user's autograd.Functions that are declared to be pure: memsave_ext/remat/functions.py tells a
// block when their forward begins and ends. To the block each is an operator, of a list of tensors
// and of what calls it again; its results are those of the forward and what that has saved.
#pragma once

#include <ATen/core/custom_class.h>
#include <ATen/core/ivalue.h>
#include <ATen/core/operator_name.h>
#include <pybind11/pybind11.h>

#include <string>
#include <vector>

namespace memsave_ext::remat {

// A forward with all of its arguments but tensors, which it is given as a list. It returns a list.
class FunctionCall final : public torch::CustomClassHolder {
 public:
  explicit FunctionCall(pybind11::object call) : call_(std::move(call)) {}
  ~FunctionCall() override;
  FunctionCall(const FunctionCall&) = delete;
  FunctionCall& operator=(const FunctionCall&) = delete;

  std::vector<at::Tensor> operator()(const std::vector<at::Tensor>& tensors) const;

 private:
  pybind11::object call_;
};

// Leaves those out that lie in the memory of what the Function was given.
std::vector<at::Tensor> new_ones(std::vector<at::Tensor> results,
                                 const std::vector<at::Tensor>& given);

// Registers the operator that stands for a Function, under a name that no other has.
c10::OperatorName declare_function(const std::string& name);
bool is_function_name(const c10::OperatorName& name);

// Of such an operator: calls it with the arguments, in whose place are its results then.
void call_function(std::vector<c10::IValue>& stack);

}  // namespace memsave_ext::remat
