#include "adam/shards.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/stack.h>

#include <algorithm>
#include <optional>
#include <utility>

#include "adam/given.h"
#include "adam/step.h"

namespace memsave_ext::adam {

namespace py = pybind11;
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
    of_shards.push_back(sum_of_squares(parameter->grad));
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
