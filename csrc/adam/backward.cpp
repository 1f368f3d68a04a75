#include "adam/backward.h"

#include <ATen/core/grad_mode.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/autograd/variable.h>

#include "adam/stepper.h"

namespace memsave_ext::adam {

namespace py = pybind11;
using at::Tensor;

namespace {

std::optional<c10::Stream> current_stream(c10::Device device) {
  if (device.is_cpu()) return std::nullopt;
  return c10::impl::VirtualGuardImpl(device.type()).getStream(device);
}

void free_gradient(const Tensor& param, const std::optional<c10::Stream>& made_on) {
  Tensor& grad = param.mutable_grad();
  // Its memory must not be given away before what was just queued has read it.
  if (const auto current = current_stream(param.device()); made_on && made_on != current) {
    grad.record_stream(*current);
  }
  grad.reset();
}

}  // namespace

Backward::Backward(std::shared_ptr<Stepper> stepper, std::shared_ptr<Snapshot> snapshot)
    : stepper_(std::move(stepper)), snapshot_(std::move(snapshot)) {}

Backward::~Backward() {
  if (finished_ || !Py_IsInitialized()) return;
  // Backward raised. Gradients that wait are still in .grad, and what was stepped stays stepped.
  std::optional<py::gil_scoped_release> no_gil;
  if (PyGILState_Check()) no_gil.emplace();
  {
    const std::lock_guard<std::mutex> lock(stepper_->mutex_);
    for (auto& bucket : buckets_) {
      for (const auto& waiting : bucket.waiting) {
        waiting.entry->step = 0;
        forget_fresh_state(snapshot_->parameters[waiting.entry->position]);
      }
    }
    stepper_->stepped_before_failure_ += stepped_;
  }
  try {
    publish();
  } catch (const std::exception& error) {
    TORCH_WARN("Adam: could not keep the state of parameters stepped before an error: ",
               error.what());
  }
}

Backward::Bucket& Backward::bucket_of(const Tensor& param) {
  const auto stream = current_stream(param.device());
  for (auto& bucket : buckets_) {
    if (bucket.device == param.device() && bucket.stream == stream) return bucket;
  }
  return buckets_.emplace_back(Bucket{stream, param.device(), {}, 0});
}

void Backward::add(Entry& entry, Tensor grad, bool may_flush) {
  Parameter& parameter = snapshot_->parameters[entry.position];
  Update update = checked_update(parameter, std::move(grad));
  entry.step = stepper_->step_;
  const auto bytes = static_cast<int64_t>(update.grad.nbytes());
  if (!finished_ && (bytes < stepper_->small_bytes_ || !may_flush)) {
    Bucket& bucket = bucket_of(update.param);
    bucket.waiting.push_back({&entry, parameter.tensor.grad(), std::move(update)});
    bucket.bytes += bytes;
    if (bucket.bytes >= stepper_->bucket_bytes_ && may_flush) flush(bucket);
    return;
  }
  step_all(update);
  ++stepped_;
  ++stepper_->stepped_;
  free_gradient(parameter.tensor, std::nullopt);
}

void Backward::flush(Bucket& bucket) {
  std::vector<Update> updates;
  std::vector<const Parameter*> stepped;
  updates.reserve(bucket.waiting.size());
  stepped.reserve(bucket.waiting.size());
  for (auto& [entry, grad, update] : bucket.waiting) {
    Parameter& parameter = snapshot_->parameters[entry->position];
    const Tensor& now = parameter.tensor.grad();
    if (now.is_same(grad)) {
      updates.push_back(std::move(update));
    } else if (now.defined() && parameter.local.is_same(parameter.tensor)) {
      // Somebody has put another one there.
      updates.push_back(checked_update(parameter, now));
    } else {
      // Or has taken it away; or another DTensor, which step() will look into.
      forget_fresh_state(parameter);
      if (now.defined()) entry->step = 0;
      continue;
    }
    stepped.push_back(&parameter);
  }
  step_all(updates);
  for (const Parameter* parameter : stepped) free_gradient(parameter->tensor, bucket.stream);
  stepped_ += static_cast<int64_t>(updates.size());
  stepper_->stepped_ += static_cast<int64_t>(updates.size());
  bucket.waiting.clear();
  bucket.bytes = 0;
}

void Backward::finish() {
  {
    const std::lock_guard<std::mutex> lock(stepper_->mutex_);
    for (auto& bucket : buckets_) flush(bucket);
    finished_ = true;
  }
  publish();
}

void Backward::step_reduced(const std::vector<Entry*>& entries, const std::vector<Tensor>& grads) {
  {
    const std::lock_guard<std::mutex> lock(stepper_->mutex_);
    stepper_->check_not_failed();
    std::vector<Update> updates;
    for (size_t i = 0; i < entries.size(); ++i) {
      if (entries[i]->snapshot != snapshot_.get()) continue;  // not in param_groups any more
      updates.push_back(checked_update(snapshot_->parameters[entries[i]->position], grads[i]));
    }
    step_all(updates);
    for (Entry* entry : entries) {
      if (entry->snapshot != snapshot_.get()) continue;
      entry->step = stepper_->step_;
      snapshot_->parameters[entry->position].tensor.mutable_grad().reset();
    }
    stepped_ += static_cast<int64_t>(updates.size());
    stepper_->stepped_ += static_cast<int64_t>(updates.size());
  }
  publish();
}

void Backward::publish() {
  std::vector<const Parameter*> fresh;
  {
    const std::lock_guard<std::mutex> lock(stepper_->mutex_);
    fresh = snapshot_->take_fresh();
  }
  if (fresh.empty()) return;
  const py::gil_scoped_acquire gil;
  if (const py::object optimizer = stepper_->optimizer(); !optimizer.is_none()) {
    publish_states(fresh, optimizer);
  }
}

}  // namespace memsave_ext::adam
