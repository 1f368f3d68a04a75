#include "adam/backward.h"

#include <ATen/core/grad_mode.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/autograd/variable.h>

#include <deque>
#include <utility>

#include "adam/grad_lock.h"
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
  {
    std::optional<py::gil_scoped_release> no_gil;
    if (PyGILState_Check()) no_gil.emplace();
    if (!finished_) fail();
    if (!ended_) end();
  }
  // Every tensor with a Python object would take it by itself.
  const py::gil_scoped_acquire gil;
  snapshot_.reset();
}

// Backward raised. Gradients that wait are still in .grad, and what was stepped stays stepped.
void Backward::fail() {
  {
    const std::lock_guard<std::mutex> lock(stepper_->mutex_);
    for (auto& bucket : buckets_) {
      for (const auto& waiting : bucket.waiting) {
        if (waiting.entry->waits_in == this) forget_waiting(*waiting.entry);
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
  const bool folded = stepper_->records_.is_folded(parameter.state);
  switch (task_) {
    case Task::kMeasure:
      return {parameter.local, std::move(grad), {}, parameter.group};
    case Task::kFold:
      return checked_update(parameter, std::move(grad), folded ? Phase::kFold : Phase::kFirstFold);
    case Task::kStep:
    case Task::kAccumulate:  // makes no update
      break;
  }
  return checked_update(parameter, std::move(grad), folded ? Phase::kClose : Phase::kWhole);
}

void Backward::add(Entry& entry, Tensor grad, bool may_flush) {
  Parameter& parameter = snapshot_->parameters[entry.position];
  std::optional<GradLock> lock;
  if (!grad.defined()) {
    lock.emplace(parameter.tensor);
    grad = parameter.tensor.grad();
    if (!grad.defined()) return;  // another thread has stepped with it, as part of a sum
  }
  if (entry.waits_in != nullptr) return;  // a second region's or thread's part: it is in .grad too
  Update update = make_update(entry, std::move(grad));
  if (task_ == Task::kStep) entry.step = stepper_->step_;
  if (task_ == Task::kMeasure) entry.measured = stepper_->step_;
  const auto bytes = static_cast<int64_t>(update.grad.nbytes());
  if (!finished_ && (bytes < stepper_->small_bytes_ || !may_flush)) {
    Bucket& bucket = bucket_of(update.param);
    entry.waits_in = this;
    bucket.waiting.push_back({&entry, parameter.tensor.grad(), std::move(update)});
    bucket.bytes += bytes;
    lock.reset();
    if (bucket.bytes >= stepper_->bucket_bytes_ && may_flush) flush(bucket);
    return;
  }
  apply(update, &entry);
  free_gradient(parameter.tensor, std::nullopt);
}

void Backward::forget_waiting(Entry& entry) {
  if (std::exchange(entry.waits_in, nullptr) == nullptr) return;
  entry.step = entry.measured = 0;
  forget_fresh_state(snapshot_->parameters[entry.position]);
}

void Backward::flush(Bucket& bucket) {
  std::vector<Update> updates;
  std::vector<Entry*> entries;
  std::deque<GradLock> locks;  // until the gradients are freed
  updates.reserve(bucket.waiting.size());
  entries.reserve(bucket.waiting.size());
  for (auto& [entry, grad, update] : bucket.waiting) {
    if (entry->waits_in != this) continue;  // refused since
    Parameter& parameter = snapshot_->parameters[entry->position];
    const bool is_local = parameter.local.is_same(parameter.tensor);
    if (is_local) locks.emplace_back(parameter.tensor);
    const Tensor& now = parameter.tensor.grad();
    if (now.is_same(grad)) {
      updates.push_back(std::move(update));
    } else if (now.defined() && is_local) {
      // Somebody has put another one there.
      updates.push_back(make_update(*entry, now));
    } else {
      // Or has taken it away; or another DTensor, which step() will look into.
      forget_fresh_state(parameter);
      entry->waits_in = nullptr;
      if (now.defined()) entry->step = 0;
      continue;
    }
    entries.push_back(entry);
  }
  apply(updates, entries);
  for (Entry* entry : entries) {
    entry->waits_in = nullptr;
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
  stepper_->records_.step(updates, stepper_->scaling(*snapshot_, updates.front().param.device()));
  stepped_ += static_cast<int64_t>(updates.size());
  if (task_ == Task::kStep) {
    stepper_->stepped_ += static_cast<int64_t>(updates.size());
  } else {
    for (Entry* entry : entries) entry->folded = stepper_->step_;
  }
}

void Backward::finish() {
  {
    const std::lock_guard<std::mutex> lock(stepper_->mutex_);
    for (auto& bucket : buckets_) flush(bucket);
    finished_ = true;
  }
  publish();
  end();
}

void Backward::end() {
  ended_ = true;
  const std::lock_guard<std::mutex> lock(stepper_->mutex_);
  ++stepper_->ended_;
  // Where others run, they may have states in it that are not the optimizer's yet.
  if (--stepper_->running_ == 0) stepper_->snapshot_.reset();
}

void Backward::step_reduced(const std::vector<Entry*>& entries, const std::vector<Tensor>& grads) {
  {
    const std::lock_guard<std::mutex> lock(stepper_->mutex_);
    stepper_->check_not_failed();
    std::vector<Update> updates;
    std::vector<Entry*> present;
    for (size_t i = 0; i < entries.size(); ++i) {
      if (entries[i]->snapshot != snapshot_->number) continue;  // not in param_groups any more
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
