// The arguments of the batch_norm operators, under the names in their schemas
// (memsave_ext/batch_norm/operators.py). No other C++ code lists them.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <optional>
#include <string>
#include <vector>

namespace memsave_ext::batch_norm {

// Members that an operator does not take keep their defaults. A tensor argument that is None is an
// undefined tensor.
struct Options {
  bool training = false;
  double momentum = 0, eps = 0, negative_slope = 0;
  std::string activation = "none";
  std::optional<std::string> group;
  c10::List<bool> output_mask;
};

struct Arguments : Options {
  at::Tensor grad, input, weight, bias, residual, statistics, means, running_mean, running_var;

  // Values per channel.
  int64_t count() const { return input.size(1) == 0 ? 0 : input.numel() / input.size(1); }
};

// An operator of the dispatcher. Knows where its schema has each member of Arguments.
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
  std::vector<int> places_;  // in the schema, of each member of Arguments; -1: not taken
};

}  // namespace memsave_ext::batch_norm
