// The arguments of the batch_norm operators, by the names that their schemas give them
// (memsave_ext/batch_norm/operators.py): the one place in C++ that lists them.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <optional>
#include <string>
#include <vector>

namespace memsave_ext::batch_norm {

// What an operator has not is as here, and a tensor that is None is undefined.
struct Options {
  bool training = false;
  double momentum = 0, eps = 0, negative_slope = 0;
  std::string activation = "none";
  std::optional<std::string> group;
  c10::List<bool> output_mask;
};

struct Arguments : Options {
  at::Tensor grad, input, weight, bias, residual, statistics, means, running_mean, running_var;

  // Values of a channel.
  int64_t count() const { return input.size(1) == 0 ? 0 : input.numel() / input.size(1); }
};

// An operator, and where its schema has which of them.
class Operator {
 public:
  explicit Operator(const c10::OperatorHandle& handle);
  explicit Operator(const char* name)
      : Operator(c10::Dispatcher::singleton().findSchemaOrThrow(name, "")) {}

  Arguments read(const torch::jit::Stack& stack) const;
  std::vector<at::Tensor> operator()(const Arguments& arguments) const;

 private:
  c10::OperatorHandle handle_;
  size_t size_;
  std::vector<int> places_;  // of each member of Arguments; -1: not an argument
};

}  // namespace memsave_ext::batch_norm
