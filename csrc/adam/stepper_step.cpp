// Stepper::step(), which ends a step.
#include <ATen/ops/ones_like.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/autograd/variable.h>

#include <utility>
#include <vector>

#include "adam/dtensor.h"
#include "adam/given.h"
#include "adam/stepper.h"

namespace memsave_ext::adam {

namespace py = pybind11;

int64_t Stepper::step(double max_norm, bool unscaled) {
  const bool any = any_gradient();
  // Other processes may have gradients: all of them take part in measuring the norm.
  const std::vector<at::Tensor> of_each_sharding = max_norm > 0 ? sharded() : decltype(sharded())();
  {
    const py::gil_scoped_release no_gil;
    const std::lock_guard<std::mutex> lock(mutex_);
    open_step_.check(Event::kEndStep);
    backwards_.check_none("step()");
    const bool measures = !of_each_sharding.empty();
    if (!any && !measures && open_step_.folded() == 0) return open_step_.end();
  }
  const auto snapshot = read_for_step(unscaled);
  int64_t stepped = 0;
  std::vector<FreshState> fresh;
  const py::gil_scoped_release no_gil;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    backwards_.use_snapshot(snapshot);  // errors name parameters by their position in it
    const auto remaining = with_gradients(*snapshot);
    const Batches batches = prepare(remaining);
    if (max_norm > 0) {
      open_step_.clip(batches, max_norm, snapshot->grad_scale, of_each_sharding);
    }
    for (const auto& [device, batch] : batches)
      open_step_.apply(batch, GradientAction::kStep, *snapshot);
    if (attached_) {
      for (const Parameter* parameter : remaining) parameter->tensor.mutable_grad().reset();
    }
    stepped = open_step_.end();
    fresh = snapshot->take_fresh();
  }
  const py::gil_scoped_acquire gil;
  publish_states(fresh, optimizer());
  return stepped;
}

std::shared_ptr<Snapshot> Stepper::read_for_step(bool unscaled) const {
  auto snapshot = take_snapshot();
  TORCH_CHECK(snapshot, "memsave_ext: the optimizer is gone");
  if (unscaled && snapshot->grad_scale.defined()) {
    snapshot->grad_scale = at::ones_like(snapshot->grad_scale);
  }
  for (auto& parameter : snapshot->parameters) {
    const auto param = py::reinterpret_steal<py::object>(THPVariable_Wrap(parameter.tensor));
    parameter.grad = local_gradient(param);
  }
  return snapshot;
}

std::vector<Parameter*> Stepper::with_gradients(Snapshot& snapshot) const {
  std::vector<Parameter*> found;
  for (auto& parameter : snapshot.parameters) {
    if (parameter.grad.defined() || open_step_.is_folded(parameter)) found.push_back(&parameter);
  }
  return found;
}

Stepper::Batches Stepper::prepare(const std::vector<Parameter*>& remaining) const {
  Batches batches;
  for (Parameter* parameter : remaining) {
    const Entry* entry = parameter->entry.get();
    if (entry != nullptr && parameter->grad.defined()) {
      const bool is_stepped = open_step_.is_stepped(*entry);
      if (is_stepped && entry->reduced_by_ddp) continue;  // the reducer left it in .grad
      if (entry->has_local_gradient) throw_error("not_reduced", name_of(*entry, parameter->tensor));
      if (is_stepped) throw_error("stepped_again", name_of(*entry, parameter->tensor));
    }
    open_step_.prepare(*parameter, std::move(parameter->grad), GradientAction::kStep);
    batches[parameter->local.device()].push_back(parameter);
  }
  return batches;
}

}  // namespace memsave_ext::adam
