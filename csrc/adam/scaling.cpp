#include "adam/scaling.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <functional>
#include <optional>
#include <tuple>
#include <utility>

#include "adam/given.h"
#include "adam/ops.h"

namespace memsave_ext::adam {

namespace py = pybind11;
using at::Tensor;

Tensor read_grad_scale(const py::handle& optimizer) {
  const py::object scaler = optimizer.attr("grad_scaler");
  if (scaler.is_none() || PyObject_IsTrue(scaler.attr("is_enabled")().ptr()) != 1) return {};
  const py::object scale = scaler.attr("_get_scale_async")();
  return THPVariable_Check(scale.ptr()) ? THPVariable_Unpack(scale.ptr()) : Tensor();
}

const Tensor& FoundInf::on(c10::Device device) {
  Tensor& found_inf = now_.here(device);
  if (!found_inf.defined()) found_inf = at::zeros({}, at::TensorOptions(device).dtype(at::kFloat));
  return found_inf;
}

void FoundInf::end_step(const Tensor& of_norm) {
  last_.clear();
  const auto either = [](const Tensor& a, const Tensor& b) { return at::maximum(a, b); };
  for (const auto& [device, found_inf] : now_.combined(either)) last_.push_back(found_inf);
  if (of_norm.defined()) last_.push_back(of_norm);
  now_.clear();
}

void GradNorm::add(c10::ArrayRef<Parameter*> parameters) {
  const at::NoGradGuard no_grad;
  std::map<int64_t, std::vector<Tensor>> grads;
  for (const Parameter* parameter : parameters) {
    const bool is_whole = parameter->local.is_same(parameter->tensor);
    grads[is_whole ? 0 : sharding_of(parameter->tensor).number].push_back(parameter->grad);
  }
  for (const auto& [sharding, of_sharding] : grads) {
    const Tensor squares = adam_sum_of_squares(of_sharding);
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

bool asks_other_shards(const Parameter& parameter, bool scaled) {
  if (parameter.local.is_same(parameter.tensor)) return false;
  if (parameter.group->algorithm == Algorithm::kOwn) return false;  // its own step() asks
  return parameter.phase == StepPhase::kWhole && (scaled || parameter.group->max_grad_norm > 0) &&
         sharding_of(parameter.tensor).number != 0;
}

std::vector<std::vector<Parameter*>> parts_that_agree(c10::ArrayRef<Parameter*> parameters,
                                                      bool scaled) {
  std::vector<std::vector<Parameter*>> parts;
  std::vector<std::pair<int64_t, double>> keys;
  std::vector<Parameter*> others;
  for (Parameter* parameter : parameters) {
    if (!asks_other_shards(*parameter, scaled)) {
      others.push_back(parameter);
      continue;
    }
    const std::pair key(sharding_of(parameter->tensor).number, parameter->group->max_grad_norm);
    const auto part = std::find(keys.begin(), keys.end(), key) - keys.begin();
    if (static_cast<size_t>(part) == keys.size()) {
      keys.push_back(key);
      parts.emplace_back();
    }
    parts[part].push_back(parameter);
  }
  if (!others.empty()) parts.push_back(std::move(others));
  return parts;
}

Scaling agree(c10::ArrayRef<Parameter*> parameters, const Scaling& scaling) {
  const at::NoGradGuard no_grad;
  std::vector<Tensor> of_shards;
  of_shards.reserve(parameters.size());
  for (const Parameter* parameter : parameters) {
    of_shards.push_back(adam_sum_of_squares(parameter->grad));
  }
  const Tensor here = at::stack(of_shards);
  const py::gil_scoped_acquire gil;
  auto [factors, skips] =
      given("agree")(parameters.front()->tensor, here, parameters.front()->group->max_grad_norm,
                     scaling.grad_scale, scaling.found_inf)
          .cast<std::pair<Tensor, std::optional<Tensor>>>();
  return {{}, {}, std::move(factors), skips.value_or(Tensor())};
}

}  // namespace memsave_ext::adam
