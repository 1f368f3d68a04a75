// The dispatcher's adam operator. Schema and meaning: memsave_ext/_ops.py.
#include "adam/ops.h"

#include <optional>
#include <utility>
#include <vector>

#include "adam/step.h"

namespace memsave_ext::adam {
namespace {

void adam_step_(at::TensorList params, at::TensorList grads, at::TensorList exp_avgs,
                at::TensorList exp_avg_sqs, at::TensorList max_exp_avg_sqs, at::TensorList steps,
                const std::optional<at::Tensor>& lr_tensor, double lr, double beta1, double beta2,
                double eps, double weight_decay, bool decoupled_weight_decay, bool amsgrad,
                bool maximize) {
  const auto check_length = [&](const char* name, at::TensorList list) {
    TORCH_CHECK_VALUE(list.size() == params.size(), "adam_step_: ", name, " must have ",
                      params.size(), " tensors, as params, got ", list.size());
  };
  check_length("grads", grads);
  check_length("exp_avgs", exp_avgs);
  check_length("exp_avg_sqs", exp_avg_sqs);
  check_length("steps", steps);
  if (amsgrad) check_length("max_exp_avg_sqs", max_exp_avg_sqs);
  Group group;
  group.options = {lr,      beta1,    beta2, eps, weight_decay, decoupled_weight_decay,
                   amsgrad, maximize, 0};
  if (lr_tensor) {
    if (lr_tensor->is_cpu()) {
      group.options.lr = lr_tensor->item<double>();
    } else {
      group.lr = lr_tensor->to(at::kFloat);
    }
  }
  std::vector<Update> updates;
  for (size_t i = 0; i < params.size(); ++i) {
    State state;
    state.step = steps[i];
    state.exp_avg = exp_avgs[i];
    state.exp_avg_sq = exp_avg_sqs[i];
    if (amsgrad) state.max_exp_avg_sq = max_exp_avg_sqs[i];
    updates.push_back({params[i], grads[i], std::move(state), &group});
    check_update(updates.back());
    TORCH_CHECK_VALUE(params[i].device() == params[0].device(),
                      "adam_step_: params must lie on one device, got ", params[0].device(),
                      " and ", params[i].device());
  }
  step_all(updates);
}

}  // namespace

void register_operators(torch::Library& library) { library.impl("adam_step_", adam_step_); }

}  // namespace memsave_ext::adam

TORCH_LIBRARY_IMPL(memsave_ext, CPU, library) { memsave_ext::adam::register_operators(library); }
