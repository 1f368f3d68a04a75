#include "adam/shards.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/isfinite.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/stack.h>

#include <algorithm>
#include <utility>

#include "adam/ops.h"

namespace memsave_ext::adam {

using at::Tensor;

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
  const Tensor squares = sum_over_shards(parameters.front()->tensor, at::stack(of_shards));
  const double max_norm = parameters.front()->group->max_grad_norm;
  // The factors that the kernels compute where a gradient is whole.
  Tensor norms = squares.sqrt(), inverse, skips;
  if (scaling.grad_scale.defined()) {
    const Tensor scale = scaling.grad_scale.to(at::kDouble);
    norms = norms / scale;
    inverse = scale.reciprocal();
    skips = squares.isfinite().logical_not().to(at::kFloat);
    scaling.found_inf.copy_(at::maximum(scaling.found_inf, skips.amax()));
  }
  if (max_norm == 0) return {{}, {}, inverse.expand_as(squares).contiguous(), skips};
  Tensor factors = (max_norm / (norms + 1e-6)).clamp_max(1);
  if (inverse.defined()) factors = inverse * factors;
  return {{}, {}, factors, skips};
}

}  // namespace memsave_ext::adam
