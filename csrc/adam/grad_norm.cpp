#include "adam/grad_norm.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>

#include <functional>
#include <tuple>

#include "adam/given.h"

namespace memsave_ext::adam {

namespace py = pybind11;
using at::Tensor;

void GradNorm::add(c10::ArrayRef<Parameter*> parameters) {
  const at::NoGradGuard no_grad;
  std::map<int64_t, std::vector<Tensor>> grads;
  for (const Parameter* parameter : parameters) {
    const bool is_whole = parameter->local.is_same(parameter->tensor);
    grads[is_whole ? 0 : sharding_of(parameter->tensor).number].push_back(parameter->grad);
  }
  for (const auto& [sharding, of_sharding] : grads) {
    const Tensor squares = sum_of_squares(of_sharding);
    Tensor& sum = squares_[sharding].here(squares.device());
    sum = sum.defined() ? sum + squares : squares;
  }
}

Tensor GradNorm::sum_of(int64_t sharding) const {
  Tensor sum;
  for (const auto& [device, squares] : squares_.at(sharding).combined(std::plus<Tensor>())) {
    sum = sum.defined() ? sum + squares.to(sum.device()) : squares;
  }
  return sum;
}

void GradNorm::finish(double max_norm, const Tensor& grad_scale, c10::ArrayRef<Tensor> sharded) {
  const at::NoGradGuard no_grad;
  const py::gil_scoped_acquire gil;
  std::map<int64_t, Tensor> sums;
  for (const auto& of : squares_) sums.emplace(of.first, sum_of(of.first));
  std::optional<Tensor> skip;
  std::tie(norm_, factor_, skip) = given("clip_to_norm")(sums, max_norm, grad_scale, sharded.vec())
                                       .cast<std::tuple<Tensor, Tensor, std::optional<Tensor>>>();
  skip_ = skip.value_or(Tensor());
  made_on_ = current_stream(factor_.device());
}

Scaling GradNorm::scaling(c10::Device device) const {
  use_here(factor_, made_on_);
  if (skip_.defined()) use_here(skip_, made_on_);
  return {{}, {}, factor_.to(device), skip_.defined() ? skip_.to(device) : Tensor()};
}

}  // namespace memsave_ext::adam
