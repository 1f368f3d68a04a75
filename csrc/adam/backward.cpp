#include "adam/backward.h"

#include <ATen/core/grad_mode.h>
#include <c10/core/StreamGuard.h>
#include <torch/csrc/Device.h>
#include <torch/csrc/PyInterpreter.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <exception>
#include <functional>
#include <iterator>
#include <utility>
#include <vector>

#include "adam/collector.h"
#include "adam/errors.h"
#include "adam/parameter.h"
#include "adam/state.h"
#include "remat/content.h"

namespace memsave_ext::adam {

namespace py = pybind11;
using at::Tensor;

// Whether this backward still has to recompute dropped values from the parameter as it is now.
bool Backward::is_awaited(const Parameter& parameter) const {
  return action_ == GradientAction::kStep && remat::is_needed(parameter.local);
}

namespace {

c10::SafePyObject kept(py::object object) { return {object.release().ptr(), getPyInterpreter()}; }

}  // namespace

Backward::Backward(std::shared_ptr<Collector> collector, std::shared_ptr<Snapshot> snapshot,
                   const py::tuple& begun)
    : collector_(std::move(collector)),
      snapshot_(std::move(snapshot)),
      optimizer_(kept(begun[0])),
      stepper_(kept(collector_->stepper())),
      action_(named<GradientAction>(kActions, begun[1].cast<std::string>(), "no backward can")),
      asks_(named<Asks>(kAsks, begun[2].cast<std::string>(), "no shards ask")) {}

py::object Backward::stepper() const {
  return py::reinterpret_borrow<py::object>(stepper_.ptr(getPyInterpreter()));
}

void Backward::check_use(const Entry& entry) const {
  const uint64_t now = collector_->step_number();
  const bool measured = entry.measured == now;
  const Expected& expected = collector_->expected();
  if (entry.step != now && measured == expected.measured && expected.uses) return;
  ask_stepper("check_gradient", name_of(entry, snapshot_->parameters[entry.position].tensor),
              entry.step == now, measured);
}

// Notes that the parameter takes part in this step. Its gradient may still wait in a bucket.
void Backward::note_use(Entry& entry) const {
  if (action_ == GradientAction::kStep) entry.step = collector_->step_number();
  if (action_ == GradientAction::kMeasure) entry.measured = collector_->step_number();
}

const Scaling& Backward::scaling(c10::Device device) {
  const auto stream = current_stream(device);
  for (const auto& known : scalings_) {
    if (known.device == device && known.stream == stream) return known.scaling;
  }
  const py::gil_scoped_acquire gil;
  const auto on = py::reinterpret_steal<py::object>(THPDevice_New(device));
  const Scaling read = read_scaling(stepper().attr("scaling")(on));
  return scalings_.emplace_back(OnStream{device, stream, read}).scaling;
}

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

// Called by a destructor, so that it does not throw.
void Backward::tell_failure() const {
  const py::gil_scoped_acquire gil;
  const int limit = Py_GetRecursionLimit();
  Py_SetRecursionLimit(limit + 100);  // the error may be that there is no room for another call
  try {
    ask_stepper("failed", stepped_);
  } catch (py::error_already_set& error) {  // Ctrl-C, for example
    error.discard_as_unraisable("memsave_ext: a backward that raised");
  }
  Py_SetRecursionLimit(limit);
}

// The backward raised. Queued gradients are still in .grad; parameters that were stepped stay so.
void Backward::fail() {
  {
    const std::lock_guard lock(collector_->mutex());
    for (auto& bucket : buckets_) {
      for (const auto& waiting : bucket.waiting) {
        Entry& entry = *waiting.parameter->entry;
        if (entry.waits_in == this) forget_waiting(entry);
        if (waiting.is_reduced)
          ++stepped_;  // its gradient is lost, which step() must not pass over
      }
      bucket.waiting.clear();
    }
    try {
      collector_->wait_for_streams_beside();
    } catch (const std::exception&) {
      // The device has failed, of which others will tell: a destructor calls this.
    }
    if (stepped_ > 0) tell_failure();
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
  return parameter.tensor.numel() * grad.element_size() / sharding_of(parameter).shards;
}

void Backward::add(Entry& entry, const NodePtr& accumulator, const Tensor& local_grad,
                   bool may_flush) {
  Parameter& parameter = parameter_of(entry);
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
    check_use(entry);
  } catch (...) {
    forget_waiting(entry);
    throw;
  }
  // Queued already; a second region or thread has only added its part to .grad.
  if (entry.waits_in != nullptr) return;
  const bool is_sharded = local_grad.defined();
  const bool asks = is_sharded && action_ == GradientAction::kStep && !finished_ &&
                    asks_other_shards(parameter, asks_);
  const Kind kind = asks ? Kind::kShardsThatAsk : is_sharded ? Kind::kShards : Kind::kPlain;
  const bool is_small = static_cast<int64_t>(grad.nbytes()) < collector_->small_bytes();
  // To wait is worth it for what is saved in calls, or in collectives: a shard by itself is stepped
  // at once.
  const bool waits = asks || (is_small && !is_sharded) || !may_flush;
  if (!finished_ && (waits || is_awaited(parameter))) {
    Bucket& bucket = bucket_of(parameter.local, kind);
    // By now all hooks of the parameters that were queued before this one have run.
    if (kind == Kind::kShards || (asks && bucket.bytes >= collector_->bucket_bytes())) {
      flush(bucket, false);
    }
    note_use(entry);
    entry.waits_in = this;
    const int64_t bytes = bytes_of(parameter, grad, kind);
    // FSDP2's gradients are views of one buffer of all that was reduced together, which a small one
    // would keep alive.
    const Tensor kept = is_sharded && is_small ? leave_buffer(whole, local_grad) : local_grad;
    bucket.waiting.push_back({&parameter, accumulator, whole, kept, bytes});
    bucket.bytes += bytes;
    lock.reset();
    if (bucket.bytes >= collector_->bucket_bytes() && may_flush) flush(bucket, false);
    return;
  }
  collector_->prepare(parameter, grad, action_);
  note_use(entry);
  Parameter* const one = &parameter;
  is_sharded ? apply_beside(one, current_stream(parameter.local.device())) : apply(one);
  parameter.tensor.mutable_grad().reset();
}

std::variant<std::string, std::unique_ptr<StepInRows>> Backward::step_in_rows(
    const Entry& entry, const NodePtr& accumulator) {
  if (action_ != GradientAction::kStep) return "this backward accumulates or measures gradients";
  if (finished_ || !has(entry)) return "the weight has been removed from the optimizer";
  Parameter& parameter = parameter_of(entry);
  const GradLock lock(accumulator);
  if (entry.waits_in != nullptr || parameter.tensor.mutable_grad().defined()) {
    return ".grad of the weight is set, to which this gradient has to be added";
  }
  if (is_awaited(parameter)) return "remat has still to compute dropped results from the weight";
  collector_->prepare(parameter, {}, action_);
  if (auto obstacle = obstacle_to_rows(parameter)) {
    forget_prepared(parameter);
    return *std::move(obstacle);
  }
  auto begun = collector_->records().step_in_rows(parameter);
  note_use(*parameter.entry);
  count_stepped(1);
  return begun;
}

std::optional<std::string> Backward::obstacle_to_rows(const Parameter& parameter) const {
  {
    const py::gil_scoped_acquire gil;
    const py::object found = stepper().attr("obstacle_to_rows")(
        parameter.group->max_grad_norm > 0, collector_->is_stepped(*parameter.entry));
    if (!found.is_none()) return found.cast<std::string>();
  }
  const char* obstacle = StepInRows::obstacle(parameter);
  return obstacle == nullptr ? std::nullopt : std::optional<std::string>(obstacle);
}

// Steps on a stream of its own: FSDP2 calls hooks on the stream of its reductions, and the next
// reduction would wait for the step.
void Backward::apply_beside(c10::ArrayRef<Parameter*> parameters,
                            const std::optional<c10::Stream>& made_on) {
  if (!made_on || parameters.empty()) return apply(parameters);
  const c10::Stream beside = collector_->stream_beside(*made_on);
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
    collector_->prepare(parameter, waiting.grad, action_);
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
  collector_->prepare(parameter, is_dtensor ? waiting.local_grad : now, action_);
  return true;
}

void Backward::flush(Bucket& bucket, bool all) {
  std::deque<Waiting> stays;
  std::vector<Waiting*> goes;
  std::vector<Parameter*> ready;
  std::vector<NodePtr> accumulators;
  goes.reserve(bucket.waiting.size());
  ready.reserve(bucket.waiting.size());
  accumulators.reserve(bucket.waiting.size());
  for (auto& waiting : bucket.waiting) {
    if (waiting.parameter->entry->waits_in != this) continue;  // was forgotten
    // To step shards that ask is a collective, so all processes must flush the same ones. One that
    // a recompute still needs is flushed, too, and the recompute raises: kept back, it would leave
    // the other processes waiting.
    if (!all && bucket.kind != Kind::kShardsThatAsk && is_awaited(*waiting.parameter)) {
      stays.push_back(std::move(waiting));
      continue;
    }
    if (!waiting.local_grad.defined()) accumulators.push_back(std::move(waiting.accumulator));
    goes.push_back(&waiting);
  }
  // By their addresses: backwards on several threads may have the same gradients in different
  // orders, and would wait for each other's locks. Only that one of them flushes at a time, with
  // the collector's lock, would keep them apart otherwise.
  std::sort(accumulators.begin(), accumulators.end(),
            [](const NodePtr& a, const NodePtr& b) { return std::less<>()(a.get(), b.get()); });
  std::deque<GradLock> locks;  // held until the gradients are freed
  for (NodePtr& accumulator : accumulators) locks.emplace_back(std::move(accumulator));
  for (const Waiting* waiting : goes) {
    if (prepare(*waiting)) ready.push_back(waiting->parameter);
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
  if (parameters.empty()) return;
  const auto batch = [&] { return Batch(collector_, snapshot_, parameters, asks_); };
  if (action_ == GradientAction::kMeasure) {
    ask_stepper("measure", batch());
  } else if (parameters.front()->group->algorithm == Algorithm::kOwn) {
    ask_stepper("step_by_own", batch());
  } else if (asks_ != Asks::kNever && batch().asks()) {
    ask_stepper("step_shards", batch());
  } else {
    collector_->step(parameters, scaling(parameters.front()->local.device()));
  }
  for (Parameter* parameter : parameters) parameter->grad.reset();
  if (action_ == GradientAction::kStep) count_stepped(static_cast<int64_t>(parameters.size()));
}

void Backward::count_stepped(int64_t parameters) {
  stepped_ += parameters;
  if (collector_->count_stepped(parameters)) ask_stepper("stepped");
}

void Backward::finish() {
  {
    const std::lock_guard lock(collector_->mutex());
    for (auto& bucket : buckets_) flush(bucket, true);
    collector_->wait_for_streams_beside();
    finished_ = true;
  }
  publish();
  end();
}

void Backward::end() {
  ended_ = true;
  const std::lock_guard lock(collector_->mutex());
  collector_->backwards().end_one();
}

void Backward::publish() {
  std::vector<FreshState> fresh;
  {
    const std::lock_guard lock(collector_->mutex());
    for (Parameter& parameter : snapshot_->parameters) take_fresh(parameter, fresh);
  }
  if (fresh.empty()) return;
  const py::gil_scoped_acquire gil;
  publish_states(fresh, optimizer_.ptr(getPyInterpreter()));
}

void Backward::add_reduced(Parameter& parameter, const Tensor& grad) {
  Entry& entry = *parameter.entry;
  note_use(entry);
  entry.waits_in = this;
  Bucket& bucket = bucket_of(parameter.local, Kind::kPlain);
  const auto bytes = static_cast<int64_t>(grad.nbytes());
  bucket.waiting.push_back({&parameter, {}, grad.clone(), {}, bytes, true});  // DDP reuses memory
  bucket.bytes += bytes;
  parameter.tensor.mutable_grad().reset();
}

void Backward::step_reduced(const py::list& params, const py::list& grads) {
  std::vector<std::shared_ptr<Entry>> entries;
  std::vector<Tensor> of_entries;
  for (size_t i = 0; i < py::len(grads); ++i) {
    auto entry = collector_->entry_of(params[i]);
    if (!entry) continue;
    entries.push_back(std::move(entry));
    of_entries.push_back(THPVariable_Unpack(grads[i].ptr()));
  }
  const py::gil_scoped_release no_gil;
  {
    const std::lock_guard lock(collector_->mutex());
    std::vector<Parameter*> ready;
    for (size_t i = 0; i < entries.size(); ++i) {
      if (!has(*entries[i])) continue;  // not in param_groups any more
      check_use(*entries[i]);
      Parameter& parameter = parameter_of(*entries[i]);
      if (!finished_ && is_awaited(parameter)) {
        add_reduced(parameter, of_entries[i]);
        continue;
      }
      ready.push_back(&parameter);
      collector_->prepare(parameter, of_entries[i], action_);
    }
    apply(ready);
    for (Parameter* parameter : ready) {
      note_use(*parameter->entry);
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

std::shared_ptr<Backward> Backwards::begin(Collector& collector) {
  const int64_t graph_task = torch::autograd::get_current_graph_task_id();
  if (graph_task == -1) return nullptr;
  {
    const std::lock_guard lock(collector.mutex());
    if (auto backward = current()) return backward;
  }
  std::optional<c10::SafePyObject> begun;
  {
    const py::gil_scoped_acquire gil;
    const py::object stepper = collector.stepper();
    py::object asked = stepper.is_none() ? stepper : stepper.attr("begin_backward")();
    if (asked.is_none()) return nullptr;  // the optimizer is gone
    begun.emplace(asked.release().ptr(), getPyInterpreter());
  }
  std::shared_ptr<Backward> backward;
  while (!backward) {
    std::shared_ptr<Snapshot> taken, other;  // declared here so that none dies with the mutex held
    uint64_t ended;
    {
      const std::lock_guard lock(collector.mutex());
      taken = shared();  // of a backward that runs, an outer one for example
      ended = ended_;
    }
    if (!taken) taken = collector.take_snapshot();
    if (!taken) return nullptr;
    const std::lock_guard lock(collector.mutex());
    if (auto of_another_devices_thread = current()) return of_another_devices_thread;
    other = shared();
    if (other) {  // another thread's backward has begun meanwhile: both share its snapshot
      taken.swap(other);
    } else if (ended != ended_) {  // one has ended, and `taken` may lack the states that it made
      continue;
    } else {
      use_snapshot(taken);
    }
    const py::gil_scoped_acquire gil;
    backward = std::make_shared<Backward>(
        collector.shared_from_this(), taken,
        py::reinterpret_borrow<py::tuple>(begun->ptr(getPyInterpreter())));
    ++running_;
    by_task_.erase(std::remove_if(by_task_.begin(), by_task_.end(),
                                  [](const auto& of) { return of.second.expired(); }),
                   by_task_.end());
    by_task_.emplace_back(graph_task, backward);
  }
  // The callback has the only lasting reference: where the graph task fails, the backward is
  // destroyed unfinished. It runs after callbacks that others queue in the backward: each root of
  // FSDP2's reduces its last gradients in one.
  auto& engine = torch::autograd::Engine::get_default_engine();
  engine.queue_callback(
      [backward, &engine] { engine.queue_callback([backward] { backward->finish(); }); });
  return backward;
}

void Backwards::end_one() {
  ++ended_;
  // Backwards that still run may have states in it that are not published yet.
  if (--running_ == 0) snapshot_.reset();
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
