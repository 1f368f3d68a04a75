#include "adam/backward.h"

#include <ATen/core/grad_mode.h>
#include <c10/core/StreamGuard.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "adam/checks.h"
#include "adam/dtensor.h"
#include "adam/given.h"
#include "adam/grad_lock.h"
#include "adam/stepper.h"
#include "remat/content.h"

namespace memsave_ext::adam {

namespace py = pybind11;
using at::Tensor;

// Whether this backward still has to recompute dropped values from the parameter as it is now.
bool Backward::is_awaited(const Parameter& parameter) const {
  return action_ == GradientAction::kStep && remat::is_needed(parameter.local);
}

Backward::Backward(std::shared_ptr<Stepper> stepper, std::shared_ptr<Snapshot> snapshot,
                   GradientAction action)
    : stepper_(std::move(stepper)), snapshot_(std::move(snapshot)), action_(action) {}

Backward::~Backward() {
  if (!Py_IsInitialized()) return;
  {
    std::optional<py::gil_scoped_release> no_gil;
    if (PyGILState_Check()) no_gil.emplace();
    if (!finished_) fail();
    if (!ended_) end();
  }
  // Taken once: each tensor with a Python object would take it by itself to be freed.
  const py::gil_scoped_acquire gil;
  snapshot_.reset();
}

// The backward raised. Queued gradients are still in .grad; parameters that were stepped stay so.
void Backward::fail() {
  {
    const std::lock_guard<std::mutex> lock(stepper_->mutex());
    for (auto& bucket : buckets_) {
      for (const auto& waiting : bucket.waiting) {
        Entry& entry = *waiting.parameter->entry;
        if (entry.waits_in == this) forget_waiting(entry);
        if (waiting.is_reduced)
          ++stepped_;  // its gradient is lost, which step() must not pass over
      }
      bucket.waiting.clear();
    }
    stepper_->wait_for_streams_beside();
    stepper_->open_step().fail(stepped_);
  }
  try {
    publish();
  } catch (const std::exception& error) {
    TORCH_WARN("memsave_ext: could not keep the state of parameters stepped before an error: ",
               error.what());
  }
}

Backward::Bucket& Backward::bucket_of(const Tensor& param, Kind kind) {
  const auto stream = current_stream(param.device());
  for (auto& bucket : buckets_) {
    if (bucket.kind == kind && bucket.device == param.device() && bucket.stream == stream) {
      return bucket;
    }
  }
  return buckets_.emplace_back(Bucket{kind, stream, param.device(), {}, 0});
}

int64_t Backward::bytes_of(const Parameter& parameter, const Tensor& grad, Kind kind) {
  if (kind != Kind::kShardsThatAsk) return static_cast<int64_t>(grad.nbytes());
  const Tensor& whole = parameter.tensor;
  return whole.numel() * grad.element_size() / sharding_of(whole).shards;
}

void Backward::add(Entry& entry, const NodePtr& accumulator, const Tensor& local_grad,
                   bool may_flush) {
  Parameter& parameter = parameter_of(entry);
  OpenStep& step = stepper_->open_step();
  std::optional<GradLock> lock;
  if (!local_grad.defined()) lock.emplace(accumulator);
  const Tensor& whole = parameter.tensor.mutable_grad();
  const Tensor& grad = local_grad.defined() ? local_grad : whole;
  if (!grad.defined()) return;  // a hook has taken it, or another thread has used it
  if (parameter.group->algorithm == Algorithm::kOwn && grad.layout() != at::kStrided) {
    throw_error("sparse_for_own_step");
  }
  check_dense(grad, parameter.group->options.rule);
  try {
    step.check_use(entry, parameter.tensor);
  } catch (...) {
    forget_waiting(entry);
    throw;
  }
  // Queued already; a second region or thread has only added its part to .grad.
  if (entry.waits_in != nullptr) return;
  const bool is_sharded = local_grad.defined();
  const bool asks = is_sharded && action_ == GradientAction::kStep && !finished_ &&
                    step.asks_others(parameter, *snapshot_);
  const Kind kind = asks ? Kind::kShardsThatAsk : is_sharded ? Kind::kShards : Kind::kPlain;
  const bool is_small = static_cast<int64_t>(grad.nbytes()) < stepper_->small_bytes();
  // To wait is worth it for what is saved in calls, or in collectives: a shard by itself is stepped
  // at once.
  const bool waits = asks || (is_small && !is_sharded) || !may_flush;
  if (!finished_ && (waits || is_awaited(parameter))) {
    Bucket& bucket = bucket_of(parameter.local, kind);
    // By now all hooks of the parameters that were queued before this one have run.
    if (kind == Kind::kShards || (asks && bucket.bytes >= stepper_->bucket_bytes())) {
      flush(bucket, false);
    }
    step.note_use(entry, action_);
    entry.waits_in = this;
    const int64_t bytes = bytes_of(parameter, grad, kind);
    // FSDP2's gradients are views of one buffer of all that was reduced together, which a small one
    // would keep alive.
    const Tensor kept = is_sharded && is_small ? leave_buffer(whole, local_grad) : local_grad;
    bucket.waiting.push_back({&parameter, accumulator, whole, kept, bytes});
    bucket.bytes += bytes;
    lock.reset();
    if (bucket.bytes >= stepper_->bucket_bytes() && may_flush) flush(bucket, false);
    return;
  }
  step.prepare(parameter, grad, action_);
  step.note_use(entry, action_);
  Parameter* const one = &parameter;
  is_sharded ? apply_beside(one, current_stream(parameter.local.device())) : apply(one);
  parameter.tensor.mutable_grad().reset();
}

std::variant<const char*, std::unique_ptr<StepInRows>> Backward::step_in_rows(
    const Entry& entry, const NodePtr& accumulator) {
  if (action_ != GradientAction::kStep) return "this backward accumulates or measures gradients";
  if (finished_ || !has(entry)) return "the optimizer does not have it any more";
  Parameter& parameter = parameter_of(entry);
  OpenStep& step = stepper_->open_step();
  const GradLock lock(accumulator);
  if (entry.waits_in != nullptr || parameter.tensor.mutable_grad().defined()) {
    return "its .grad is set, to which this gradient is added";
  }
  if (is_awaited(parameter)) return "remat has to compute dropped values from it";
  step.prepare(parameter, {}, action_);
  if (const char* obstacle = step.obstacle_to_rows(parameter, *snapshot_)) {
    forget_prepared(parameter);
    return obstacle;
  }
  auto begun = step.step_in_rows(parameter);
  ++stepped_;
  return begun;
}

// Steps on a stream of its own: FSDP2 calls hooks on the stream of its reductions, and the next
// reduction would wait for the step.
void Backward::apply_beside(c10::ArrayRef<Parameter*> parameters,
                            const std::optional<c10::Stream>& made_on) {
  if (!made_on || parameters.empty()) return apply(parameters);
  const c10::Stream beside = stepper_->stream_beside(*made_on);
  std::vector<Tensor> grads;
  for (const Parameter* parameter : parameters) grads.push_back(parameter->grad);
  // At the end of backward another stream is the current one, on which new states are made.
  const c10::Stream current = *current_stream(made_on->device());
  order_after(beside, current);
  if (current != *made_on) order_after(beside, *made_on);
  {
    const c10::StreamGuard on_stream(beside);
    apply(parameters);
  }
  for (const Tensor& grad : grads) grad.record_stream(beside);
}

void Backward::forget_waiting(Entry& entry) {
  if (std::exchange(entry.waits_in, nullptr) == nullptr) return;
  entry.step = entry.measured = 0;
  forget_prepared(parameter_of(entry));
}

// Readies the parameter with the gradient that it has now. Returns false where the action no longer
// applies to it.
bool Backward::prepare(const Waiting& waiting) {
  Parameter& parameter = *waiting.parameter;
  if (waiting.is_reduced) {
    stepper_->open_step().prepare(parameter, waiting.grad, action_);
    return true;
  }
  const Tensor& now = parameter.tensor.mutable_grad();
  const bool is_dtensor = waiting.local_grad.defined();
  // Something else has taken the gradient away, or replaced a DTensor, which is then left to
  // step().
  if (!now.defined() || (is_dtensor && !now.is_same(waiting.grad))) {
    parameter.entry->waits_in = nullptr;
    if (now.defined()) parameter.entry->step = 0;
    return false;
  }
  stepper_->open_step().prepare(parameter, is_dtensor ? waiting.local_grad : now, action_);
  return true;
}

void Backward::flush(Bucket& bucket, bool all) {
  std::deque<Waiting> stays;
  std::vector<Parameter*> ready;
  std::deque<GradLock> locks;  // held until the gradients are freed
  ready.reserve(bucket.waiting.size());
  for (auto& waiting : bucket.waiting) {
    if (waiting.parameter->entry->waits_in != this) continue;  // was forgotten
    if (!all && is_awaited(*waiting.parameter)) {
      stays.push_back(std::move(waiting));
      continue;
    }
    if (!waiting.local_grad.defined()) locks.emplace_back(std::move(waiting.accumulator));
    if (prepare(waiting)) ready.push_back(waiting.parameter);
  }
  if (bucket.kind != Kind::kPlain) {
    apply_beside(ready, bucket.stream);
  } else {
    // The end of backward waits for the streams of all hooks; their memory may go on being reused.
    const auto current = current_stream(bucket.device);
    if (current != bucket.stream) {
      for (Parameter* parameter : ready) parameter->grad.record_stream(*current);
    }
    apply(ready);
  }
  for (Parameter* parameter : ready) {
    parameter->entry->waits_in = nullptr;
    parameter->tensor.mutable_grad().reset();
  }
  bucket.waiting = std::move(stays);
  bucket.bytes = 0;
  for (const auto& waiting : bucket.waiting) bucket.bytes += waiting.bytes;
}

void Backward::apply(c10::ArrayRef<Parameter*> parameters) {
  stepper_->open_step().apply(parameters, action_, *snapshot_);
  if (action_ != GradientAction::kMeasure) stepped_ += static_cast<int64_t>(parameters.size());
}

void Backward::finish() {
  {
    const std::lock_guard<std::mutex> lock(stepper_->mutex());
    for (auto& bucket : buckets_) flush(bucket, true);
    stepper_->wait_for_streams_beside();
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

void Backward::publish() {
  std::vector<FreshState> fresh;
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

void Backward::add_reduced(Parameter& parameter, const Tensor& grad) {
  Entry& entry = *parameter.entry;
  stepper_->open_step().note_use(entry, action_);
  entry.waits_in = this;
  Bucket& bucket = bucket_of(parameter.local, Kind::kPlain);
  const auto bytes = static_cast<int64_t>(grad.nbytes());
  bucket.waiting.push_back({&parameter, {}, grad.clone(), {}, bytes, true});  // DDP reuses memory
  bucket.bytes += bytes;
  parameter.tensor.mutable_grad().reset();
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
      Parameter& parameter = parameter_of(*entries[i]);
      if (!finished_ && is_awaited(parameter)) {
        add_reduced(parameter, grads[i]);
        continue;
      }
      ready.push_back(&parameter);
      step.prepare(parameter, grads[i], action_);
    }
    apply(ready);
    for (Parameter* parameter : ready) {
      step.note_use(*parameter->entry, action_);
      parameter->tensor.mutable_grad().reset();
    }
  }
  publish();
}

// Locks only the weak pointer that it returns: a strong one to another backward could be the last,
// and destroy it with the mutex held.
std::shared_ptr<Backward> Backwards::current() const {
  const int64_t task = torch::autograd::get_current_graph_task_id();
  for (const auto& [of_task, backward] : by_task_) {
    if (of_task == task) return backward.lock();
  }
  return nullptr;
}

std::shared_ptr<Backward> Backwards::begin(Stepper& stepper) {
  const int64_t graph_task = torch::autograd::get_current_graph_task_id();
  if (graph_task == -1) return nullptr;
  {
    const std::lock_guard<std::mutex> lock(stepper.mutex());
    if (auto backward = current()) return backward;
  }
  const GradientAction action = stepper.next_action();
  std::shared_ptr<Backward> backward;
  while (!backward) {
    std::shared_ptr<Snapshot> taken, other;  // declared here so that none dies with the mutex held
    uint64_t ended;
    {
      const std::lock_guard<std::mutex> lock(stepper.mutex());
      taken = snapshot_.lock();  // of a backward that runs, an outer one for example
      ended = ended_;
    }
    if (!taken) taken = stepper.take_snapshot();
    if (!taken) return nullptr;
    const std::lock_guard<std::mutex> lock(stepper.mutex());
    if (auto of_another_devices_thread = current()) return of_another_devices_thread;
    other = snapshot_.lock();
    if (other) {  // another thread's backward has begun meanwhile: both share its snapshot
      taken.swap(other);
    } else if (ended != ended_) {  // one has ended, and `taken` may lack the states that it made
      continue;
    } else {
      use_snapshot(taken);
    }
    backward = std::make_shared<Backward>(stepper.shared_from_this(), taken, action);
    ++running_;
    by_task_.erase(std::remove_if(by_task_.begin(), by_task_.end(),
                                  [](const auto& of) { return of.second.expired(); }),
                   by_task_.end());
    by_task_.emplace_back(graph_task, backward);
  }
  // The callback has the only lasting reference: where the graph task fails, the backward is
  // destroyed unfinished.
  torch::autograd::Engine::get_default_engine().queue_callback([backward] { backward->finish(); });
  return backward;
}

void Backwards::end_one() {
  ++ended_;
  // Backwards that still run may have states in it that are not published yet.
  if (--running_ == 0) snapshot_.reset();
}

void Backwards::check_none(const char* call) const {
  if (running_ > 0) throw_error("backward_runs", call);
}

void Backwards::use_snapshot(const std::shared_ptr<Snapshot>& snapshot) {
  snapshot_ = snapshot;
  snapshot->number = ++snapshots_;
  for (size_t i = 0; i < snapshot->parameters.size(); ++i) {
    const auto& entry = snapshot->parameters[i].entry;
    if (!entry) continue;
    entry->snapshot = snapshot->number;
    entry->position = i;
  }
}

}  // namespace memsave_ext::adam
