#include "adam/backward.h"

#include <ATen/core/grad_mode.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/autograd/variable.h>

#include <deque>
#include <utility>

#include "adam/grad_lock.h"
#include "adam/stepper.h"
#include "remat/needed.h"

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

// Whether values that this backward still needs are computed from the parameter as it is.
bool is_awaited(const Parameter& parameter, Task task) {
  return task == Task::kStep && remat::is_needed(parameter.local);
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
    const std::lock_guard<std::mutex> lock(stepper_->mutex());
    for (auto& bucket : buckets_) {
      for (const auto& waiting : bucket.waiting) {
        Entry& entry = *waiting.parameter->entry;
        if (entry.waits_in == this) forget_waiting(entry);
      }
      bucket.waiting.clear();
    }
    stepper_->open_step().fail(stepped_);
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

void Backward::add(Entry& entry, Tensor grad, bool may_flush) {
  Parameter& parameter = parameter_of(entry);
  std::optional<GradLock> lock;
  if (!grad.defined()) {
    lock.emplace(parameter.tensor);
    grad = parameter.tensor.grad();
    if (!grad.defined()) return;  // another thread has stepped with it, as part of a sum
  }
  if (entry.waits_in != nullptr) return;  // a second region's or thread's part: it is in .grad too
  OpenStep& step = stepper_->open_step();
  step.prepare(parameter, std::move(grad), task_);
  step.note_use(entry, task_);
  const auto bytes = static_cast<int64_t>(parameter.grad.nbytes());
  const bool is_small = bytes < stepper_->small_bytes();
  if (!finished_ && (is_small || !may_flush || is_awaited(parameter, task_))) {
    Bucket& bucket = bucket_of(parameter.local);
    entry.waits_in = this;
    bucket.waiting.push_back({&parameter, parameter.tensor.grad()});
    bucket.bytes += bytes;
    lock.reset();
    if (bucket.bytes >= stepper_->bucket_bytes() && may_flush) flush(bucket, false);
    return;
  }
  apply(&parameter);
  free_gradient(parameter.tensor, std::nullopt);
}

void Backward::forget_waiting(Entry& entry) {
  if (std::exchange(entry.waits_in, nullptr) == nullptr) return;
  entry.step = entry.measured = 0;
  forget_prepared(parameter_of(entry));
}

void Backward::flush(Bucket& bucket, bool all) {
  std::vector<Waiting> stays;
  std::vector<Parameter*> ready;
  std::deque<GradLock> locks;  // until the gradients are freed
  ready.reserve(bucket.waiting.size());
  for (auto& [parameter, grad] : bucket.waiting) {
    Entry& entry = *parameter->entry;
    if (entry.waits_in != this) continue;  // refused since
    if (!all && is_awaited(*parameter, task_)) {
      stays.push_back({parameter, std::move(grad)});
      continue;
    }
    const bool is_local = parameter->local.is_same(parameter->tensor);
    if (is_local) locks.emplace_back(parameter->tensor);
    const Tensor& now = parameter->tensor.grad();
    if (!now.is_same(grad)) {
      // Somebody has put another one there, or has taken it away; another DTensor is looked into by
      // step().
      if (!now.defined() || !is_local) {
        forget_prepared(*parameter);
        entry.waits_in = nullptr;
        if (now.defined()) entry.step = 0;
        continue;
      }
      stepper_->open_step().prepare(*parameter, now, task_);
    }
    ready.push_back(parameter);
  }
  apply(ready);
  for (Parameter* parameter : ready) {
    parameter->entry->waits_in = nullptr;
    free_gradient(parameter->tensor, bucket.stream);
  }
  bucket.waiting = std::move(stays);
  bucket.bytes = 0;
  for (const auto& waiting : bucket.waiting) {
    bucket.bytes += static_cast<int64_t>(waiting.parameter->grad.nbytes());
  }
}

void Backward::apply(c10::ArrayRef<Parameter*> parameters) {
  stepper_->open_step().apply(parameters, task_, *snapshot_);
  if (task_ != Task::kMeasure) stepped_ += static_cast<int64_t>(parameters.size());
}

void Backward::finish() {
  {
    const std::lock_guard<std::mutex> lock(stepper_->mutex());
    for (auto& bucket : buckets_) flush(bucket, true);
    finished_ = true;
  }
  publish();
  end();
}

void Backward::end() {
  ended_ = true;
  const std::lock_guard<std::mutex> lock(stepper_->mutex());
  stepper_->backwards().end_one();
}

void Backward::step_reduced(const std::vector<std::shared_ptr<Entry>>& entries,
                            const std::vector<Tensor>& grads) {
  {
    const std::lock_guard<std::mutex> lock(stepper_->mutex());
    OpenStep& step = stepper_->open_step();
    step.check(Event::kUseGradient);
    std::vector<Parameter*> ready;
    for (size_t i = 0; i < entries.size(); ++i) {
      if (!has(*entries[i])) continue;  // not in param_groups any more
      ready.push_back(&parameter_of(*entries[i]));
      step.prepare(*ready.back(), grads[i], task_);
    }
    apply(ready);
    for (Parameter* parameter : ready) {
      step.note_use(*parameter->entry, task_);
      parameter->tensor.mutable_grad().reset();
    }
  }
  publish();
}

void Backward::publish() {
  std::vector<const Parameter*> fresh;
  {
    const std::lock_guard<std::mutex> lock(stepper_->mutex());
    fresh = snapshot_->take_fresh();
  }
  if (fresh.empty()) return;
  const py::gil_scoped_acquire gil;
  if (const py::object optimizer = stepper_->optimizer(); !optimizer.is_none()) {
    publish_states(fresh, optimizer);
  }
}

}  // namespace memsave_ext::adam
