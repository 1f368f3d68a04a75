#include "adam/backward.h"

#include <ATen/core/grad_mode.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/autograd/variable.h>

#include <utility>

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

Backward::Backward(std::shared_ptr<Stepper> stepper, std::shared_ptr<Snapshot> snapshot, Task task)
    : stepper_(std::move(stepper)), snapshot_(std::move(snapshot)), task_(task) {}

Backward::~Backward() {
  if (!Py_IsInitialized()) return;
  if (!finished_) fail();
  // Every tensor with a Python object would take it by itself.
  const py::gil_scoped_acquire gil;
  snapshot_.reset();
}

// Backward raised. Gradients that wait are still in .grad, and what was stepped stays stepped.
void Backward::fail() {
  std::optional<py::gil_scoped_release> no_gil;
  if (PyGILState_Check()) no_gil.emplace();
  {
    const std::lock_guard<std::mutex> lock(stepper_->mutex_);
    for (auto& bucket : buckets_) {
      for (const auto& waiting : bucket.waiting) {
        waiting.entry->waits = false;
        waiting.entry->step = 0;
        forget_fresh_state(snapshot_->parameters[waiting.entry->position]);
      }
      bucket.waiting.clear();
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
  Bucket& bucket = buckets_.emplace_back(Bucket{stream, param.device(), {}, 0});
  bucket.waiting.reserve(64);
  return bucket;
}

Update Backward::make_update(const Entry& entry, Tensor grad) {
  Parameter& parameter = snapshot_->parameters[entry.position];
  switch (task_) {
    case Task::kMeasure:
      return {parameter.local, std::move(grad), {}, parameter.group};
    case Task::kFold:
      return checked_update(parameter, std::move(grad),
                            entry.folds > 0 ? Phase::kFold : Phase::kFirstFold);
    case Task::kStep:
    case Task::kAccumulate:  // makes no update
      break;
  }
  return checked_update(parameter, std::move(grad),
                        entry.folds > 0 ? Phase::kClose : Phase::kWhole);
}

void Backward::add(Entry& entry, Tensor grad, bool may_flush) {
  if (entry.waits) return;  // a second region's part: it is in .grad too
  Parameter& parameter = snapshot_->parameters[entry.position];
  Update update = make_update(entry, std::move(grad));
  if (task_ == Task::kStep) entry.step = stepper_->step_;
  if (task_ == Task::kMeasure) entry.measured = stepper_->step_;
  const auto bytes = static_cast<int64_t>(update.grad.nbytes());
  if (!finished_ && (bytes < stepper_->small_bytes_ || !may_flush)) {
    Bucket& bucket = bucket_of(update.param);
    entry.waits = true;
    bucket.waiting.push_back({&entry, parameter.tensor.grad(), std::move(update)});
    bucket.bytes += bytes;
    if (bucket.bytes >= stepper_->bucket_bytes_ && may_flush) flush(bucket);
    return;
  }
  apply(update, &entry);
  free_gradient(parameter.tensor, std::nullopt);
}

void Backward::flush(Bucket& bucket) {
  std::vector<Update> updates;
  std::vector<Entry*> entries;
  updates.reserve(bucket.waiting.size());
  entries.reserve(bucket.waiting.size());
  for (auto& [entry, grad, update] : bucket.waiting) {
    Parameter& parameter = snapshot_->parameters[entry->position];
    const Tensor& now = parameter.tensor.grad();
    if (now.is_same(grad)) {
      updates.push_back(std::move(update));
    } else if (now.defined() && parameter.local.is_same(parameter.tensor)) {
      // Somebody has put another one there.
      updates.push_back(make_update(*entry, now));
    } else {
      // Or has taken it away; or another DTensor, which step() will look into.
      forget_fresh_state(parameter);
      entry->waits = false;
      if (now.defined()) entry->step = 0;
      continue;
    }
    entries.push_back(entry);
  }
  apply(updates, entries);
  for (Entry* entry : entries) {
    entry->waits = false;
    free_gradient(snapshot_->parameters[entry->position].tensor, bucket.stream);
  }
  bucket.waiting.clear();
  bucket.bytes = 0;
}

void Backward::apply(c10::ArrayRef<Update> updates, c10::ArrayRef<Entry*> entries) {
  if (updates.empty()) return;
  if (task_ == Task::kMeasure) {
    std::vector<Tensor> grads;
    for (const auto& update : updates) grads.push_back(update.grad);
    stepper_->norm_->add(grads);
    return;
  }
  step_all(updates, stepper_->scaling(*snapshot_, updates.front().param.device()));
  stepped_ += static_cast<int64_t>(updates.size());
  if (task_ == Task::kStep) {
    stepper_->stepped_ += static_cast<int64_t>(updates.size());
    for (Entry* entry : entries) stepper_->folded_ -= std::exchange(entry->folds, 0) > 0;
  } else {
    for (Entry* entry : entries) stepper_->folded_ += entry->folds++ == 0;
  }
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
    std::vector<Entry*> present;
    for (size_t i = 0; i < entries.size(); ++i) {
      if (entries[i]->snapshot != snapshot_.get()) continue;  // not in param_groups any more
      updates.push_back(make_update(*entries[i], grads[i]));
      present.push_back(entries[i]);
    }
    apply(updates, present);
    for (Entry* entry : present) {
      (task_ == Task::kMeasure ? entry->measured : entry->step) = stepper_->step_;
      snapshot_->parameters[entry->position].tensor.mutable_grad().reset();
    }
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
