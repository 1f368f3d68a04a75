// What ends a step: step(), and the norm passes before it.
#include <ATen/ops/ones_like.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/autograd/variable.h>

#include "adam/dtensor.h"
#include "adam/stepper.h"

namespace memsave_ext::adam {

namespace py = pybind11;
using at::Tensor;

Scaling Stepper::scaling(const Snapshot& snapshot, c10::Device device) {
  if (norm_) {
    for (const auto& group : snapshot.groups) {
      TORCH_CHECK_VALUE(group.max_grad_norm == 0,
                        "max_grad_norm, of each parameter, cannot be combined with "
                        "clip_global_norm or norm_pass(), of all: leave one of them out");
    }
    return norm_->scaling(device);
  }
  if (!snapshot.loss_scale.defined()) return {};
  Tensor& found = found_[device];
  if (!found.defined()) found = at::zeros({}, at::TensorOptions(device).dtype(at::kFloat));
  return {snapshot.loss_scale.to(device), found, {}, {}};
}

void Stepper::begin_norm_pass() {
  TORCH_CHECK(!any_gradient() && accumulating_ == 0 && folding_ == 0,
              "Adam: norm_pass() while gradients are accumulated: it drops those that it "
              "measures. Use clip_global_norm=, which keeps them.");
  const py::gil_scoped_release no_gil;
  const std::lock_guard<std::mutex> lock(mutex_);
  check_not_failed();
  TORCH_CHECK(!norm_ && stepped_ == 0 && records_.folded() == 0,
              "Adam: norm_pass() must come before the backward that steps, once in each step");
  norm_ = std::make_unique<GradNorm>();
  measuring_ = true;
}

void Stepper::end_norm_pass(const py::object& max_norm) {
  const bool finished = !max_norm.is_none();
  const double value = finished ? max_norm.cast<double>() : 0;
  Tensor loss_scale;
  if (const py::object owner = optimizer(); !owner.is_none()) loss_scale = read_loss_scale(owner);
  const py::gil_scoped_release no_gil;
  const std::lock_guard<std::mutex> lock(mutex_);
  measuring_ = false;
  if (finished) {
    norm_->finish(value, loss_scale);
  } else {
    norm_.reset();
    ++step_;
  }
}

void Stepper::check_none_runs() {
  TORCH_CHECK(running_ == 0,
              "Adam: step() while a backward is under way, in another thread or around this call. "
              "Wait until all of a step's backwards have ended.");
}

void Stepper::end_step() {
  ++step_;
  last_found_.clear();
  for (const auto& [device, found] : found_) last_found_.push_back(found);
  found_.clear();
  if (!norm_) return;
  last_norm_ = norm_->norm();
  if (norm_->found().defined()) last_found_.push_back(norm_->found());
  norm_.reset();
}

int64_t Stepper::step(double max_norm, bool unscaled) {
  if (!any_gradient()) {
    const py::gil_scoped_release no_gil;
    const std::lock_guard<std::mutex> lock(mutex_);
    check_not_failed();
    check_none_runs();
    if (records_.folded() == 0) {
      end_step();
      return std::exchange(stepped_, 0);
    }
  }
  return step_remaining(max_norm, unscaled);
}

int64_t Stepper::step_remaining(double max_norm, bool unscaled) {
  {
    const py::gil_scoped_release no_gil;
    const std::lock_guard<std::mutex> lock(mutex_);
    check_not_failed();
    check_none_runs();
  }
  const auto snapshot = take_snapshot();
  TORCH_CHECK(snapshot, "Adam: the optimizer is gone");
  if (unscaled && snapshot->loss_scale.defined()) {
    snapshot->loss_scale = at::ones_like(snapshot->loss_scale);
  }
  std::vector<Tensor> grads;
  for (const auto& parameter : snapshot->parameters) {
    grads.push_back(
        local_gradient(py::reinterpret_steal<py::object>(THPVariable_Wrap(parameter.tensor))));
  }
  int64_t stepped = 0;
  std::vector<const Parameter*> fresh;
  const py::gil_scoped_release no_gil;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    use_snapshot(snapshot);  // which names parameters
    // By device: each has its kernels.
    ByDevice<std::vector<Update>> updates;
    std::vector<Parameter*> remaining;
    for (size_t i = 0; i < grads.size(); ++i) {
      auto& parameter = snapshot->parameters[i];
      const Entry* entry = parameter.entry.get();
      const bool folded = records_.is_folded(parameter.state);
      if (!grads[i].defined() && !folded) continue;
      remaining.push_back(&parameter);
      if (entry != nullptr && grads[i].defined()) {
        if (entry->reduced_by_ddp && entry->step == step_) continue;  // what the reducer left
        TORCH_CHECK(!entry->has_local_gradient, "Adam: the gradient of ",
                    name(*entry, parameter.tensor),
                    " has not been reduced over the processes. The last backward of a step must "
                    "be outside of ddp.no_sync().");
        TORCH_CHECK(entry->step != step_, "Adam: ", name(*entry, parameter.tensor),
                    " was stepped in backward and has a gradient again, which would be a second "
                    "step. Set .grad before backward(), or after step().");
      }
      updates[parameter.local.device()].push_back(
          checked_update(parameter, grads[i], folded ? Phase::kClose : Phase::kWhole));
    }
    if (max_norm > 0) {
      norm_ = std::make_unique<GradNorm>();
      for (const auto& [device, of_device] : updates) {
        std::vector<Tensor> measured;
        for (const auto& update : of_device) measured.push_back(update.grad);
        norm_->add(measured);
      }
      norm_->finish(max_norm, snapshot->loss_scale);
    }
    for (const auto& [device, of_device] : updates) {
      records_.step(of_device, scaling(*snapshot, device));
      stepped_ += static_cast<int64_t>(of_device.size());
    }
    for (const Parameter* parameter : remaining) {
      if (attached_) parameter->tensor.mutable_grad().reset();
    }
    records_.forget_folded();  // of parameters that are not in param_groups any more
    end_step();
    stepped = std::exchange(stepped_, 0);
    fresh = snapshot->take_fresh();
  }
  const py::gil_scoped_acquire gil;
  publish_states(fresh, optimizer());
  return stepped;
}

}  // namespace memsave_ext::adam
