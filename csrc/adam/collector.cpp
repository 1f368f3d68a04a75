#include "adam/collector.h"

#include <torch/csrc/PyInterpreter.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/autograd/utils/lambda_post_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <utility>

#include "adam/elsewhere.h"
#include "adam/errors.h"
#include "adam/hook.h"
#include "adam/parameter.h"

namespace memsave_ext::adam {

namespace py = pybind11;
using at::Tensor;

Collector::Collector(const py::object& stepper, int64_t small_bytes, int64_t bucket_bytes,
                     bool own_step)
    : stepper_(py::weakref(stepper)),
      small_bytes_(small_bytes),
      bucket_bytes_(bucket_bytes),
      own_step_(own_step) {}

Collector::~Collector() {
  if (!Py_IsInitialized()) {
    stepper_.release();
    return;
  }
  const py::gil_scoped_acquire gil;
  stepper_ = py::object();
}

void Collector::lock() {
  const py::gil_scoped_release no_gil;
  mutex_.lock();
}

py::object Collector::optimizer() const {
  py::object of = stepper();
  return of.is_none() ? of : of.attr("optimizer")();
}

// ---- hooks ----

template <typename Body>
void Collector::for_parameters(const Body& body) const {
  const py::object owner = optimizer();
  if (owner.is_none()) return;
  for (const py::handle group : owner.attr("param_groups")) {
    for (const py::handle param : group["params"]) body(param);
  }
}

py::object Collector::owner(const py::object& param) {
  const auto [collector, entry] = find_hook(param);
  if (collector == nullptr) return py::none();
  py::object optimizer = collector->optimizer();
  if (optimizer.is_none()) remove_hook(param);
  return optimizer;
}

void Collector::attach(const py::list& params) {
  for (const py::handle handle : params) {
    const auto param = py::reinterpret_borrow<py::object>(handle);
    if (owner(param).is_none()) install_hook(param, shared_from_this());
  }
  attached_ = true;
}

void Collector::detach() {
  attached_ = false;
  for_parameters([&](const py::handle& param) {
    if (find_hook(param).collector == this) remove_hook(param);
  });
}

void Collector::release(const py::list& params) const {
  for (const py::handle param : params) {
    if (find_hook(param).collector == this) remove_hook(param);
  }
}

py::list Collector::lost() const {
  py::list lost;
  if (!attached_) return lost;
  for_parameters([&](const py::handle& param) {
    if (find_hook(param).collector != this) lost.append(param);
  });
  return lost;
}

std::shared_ptr<Entry> Collector::entry_of(const py::handle& param) const {
  const Attachment attachment = find_hook(param);
  return attachment.collector == this ? attachment.entry : nullptr;
}

void Collector::ready(Entry& entry, const Tensor& param, bool may_step,
                      const std::function<Tensor()>& local_gradient) {
  const Intake intake = intake_;
  if (intake == Intake::kKeep) return;
  const NodePtr accumulator = torch::autograd::impl::grad_accumulator(param);
  if (intake == Intake::kDrop) {
    if (!may_step) return;  // later hooks are still to see it
    const GradLock lock(accumulator);
    param.mutable_grad().reset();
    return;
  }
  if (entry.reduced_by_ddp) {
    const GradLock lock(accumulator);
    if (!param.mutable_grad().defined()) return;
    entry.has_local_gradient = true;
    return;
  }
  if (intake == Intake::kSum) return;
  if (is_reduced_by_ddp(accumulator)) throw_error("not_attached", param);
  std::shared_ptr<Backward> backward;
  std::unique_lock lock(mutex_);
  if (!(backward = backwards_.current())) {
    lock.unlock();
    if (!(backward = backwards_.begin(*this))) return;
    lock.lock();
  }
  if (backward->action() == GradientAction::kKeep) {
    if (!expected_.keeps) backward->ask_stepper("check_kept");
    return;
  }
  if (!backward->has(entry)) return;  // not in param_groups any more
  Tensor local_grad;
  if (local_gradient) {
    lock.unlock();
    local_grad = local_gradient();
    lock.lock();
    if (!local_grad.defined() || !backward->has(entry)) return;
  }
  backward->add(entry, accumulator, local_grad, may_step);
}

// ---- gradients in .grad ----

bool Collector::any_gradient() const {
  bool any = false;
  for_parameters([&](const py::handle& param) {
    any = any || THPVariable_Unpack(param.ptr()).grad().defined();
  });
  return any;
}

void Collector::drop_gradients() const {
  for_parameters([](const py::handle& param) {
    const Tensor& tensor = THPVariable_Unpack(param.ptr());
    // A parameter that never required a gradient has no place for one either.
    if (tensor.grad().defined()) tensor.mutable_grad().reset();
  });
}

void Collector::forget_gradients() {
  if (!attached_) return;
  drop_gradients();
  for_parameters([&](const py::handle& param) {
    if (const auto entry = entry_of(param)) entry->has_local_gradient = false;
  });
}

py::list Collector::dtensors() const {
  py::list found;
  for_parameters([&](const py::handle& param) {
    if (is_dtensor(param)) found.append(param);
  });
  return found;
}

std::shared_ptr<Snapshot> Collector::take_snapshot() const {
  const py::gil_scoped_acquire gil;
  const py::object owner = optimizer();
  if (owner.is_none()) return nullptr;
  auto snapshot = std::make_shared<Snapshot>(
      read_optimizer(owner, own_step_ ? Algorithm::kOwn : Algorithm::kRule));
  for (auto& parameter : snapshot->parameters) {
    parameter.entry = entry_of(wrapped(parameter.tensor));
  }
  return snapshot;
}

void Collector::prepare(Parameter& parameter, Tensor grad, GradientAction action) const {
  if (action == GradientAction::kMeasure) {
    parameter.grad = std::move(grad);
    return;
  }
  adam::prepare(parameter, std::move(grad));
}

void Collector::step(c10::ArrayRef<Parameter*> parameters, const Scaling& scaling) {
  try {
    records_.step(parameters, scaling);
  } catch (...) {
    // A state that lies elsewhere may not have been written back after its step.
    if (std::any_of(parameters.begin(), parameters.end(),
                    [](const Parameter* parameter) { return lies_elsewhere(*parameter); })) {
      const py::gil_scoped_acquire gil;
      if (const py::object of = stepper(); !of.is_none()) of.attr("failed")(1);
    }
    throw;
  }
}

py::list Collector::remaining(const std::string& asks) {
  py::list on_devices;
  if (!any_gradient()) return on_devices;
  const auto snapshot = take_snapshot();
  TORCH_CHECK(snapshot, "memsave_ext: the optimizer has been deleted");
  backwards_.use_snapshot(snapshot);  // errors name parameters by their position in it
  const auto asking = named<Asks>(kAsks, asks, "no shards ask");
  ByDevice<std::vector<Parameter*>> batches;
  for (auto& parameter : snapshot->parameters) {
    Tensor grad =
        is_dtensor(parameter) ? local_gradient(wrapped(parameter.tensor)) : parameter.tensor.grad();
    if (!grad.defined()) continue;
    if (const Entry* entry = parameter.entry.get()) {
      const bool stepped = is_stepped(*entry);
      const bool asked = stepped || entry->has_local_gradient;
      if (asked && !stepper()
                        .attr("uses_remaining")(name_of(*entry, parameter.tensor), stepped,
                                                entry->reduced_by_ddp, entry->has_local_gradient)
                        .cast<bool>()) {
        continue;
      }
    }
    prepare(parameter, std::move(grad), GradientAction::kStep);
    batches[parameter.local.device()].push_back(&parameter);
  }
  for (const auto& [device, parameters] : batches) {
    on_devices.append(Batch(shared_from_this(), snapshot, parameters, asking));
  }
  return on_devices;
}

void Collector::drop_used(const py::list& batches) const {
  if (!attached_) return;
  for (const py::handle batch : batches) {
    for (const Parameter* parameter : batch.cast<const Batch&>().parameters()) {
      parameter->tensor.mutable_grad().reset();
    }
  }
}

// ---- the step that is open ----

int64_t Collector::next_step() {
  ++number_;
  return std::exchange(stepped_, 0);
}

void Collector::drop_stale_low_part(const Tensor& param, const Tensor& low_part) {
  const py::gil_scoped_release no_gil;
  const std::lock_guard lock(mutex_);
  records_.drop_stale_low_part(param, low_part);
}

int64_t Collector::count_used(const py::list& params) {
  std::vector<std::shared_ptr<Entry>> entries;
  for (const py::handle param : params) entries.push_back(entry_of(param));
  const py::gil_scoped_release no_gil;
  const std::lock_guard lock(mutex_);
  return std::count_if(entries.begin(), entries.end(), [&](const auto& entry) {
    return entry != nullptr && entry->waits_in == nullptr && is_stepped(*entry);
  });
}

bool Collector::runs_backward() {
  const py::gil_scoped_release no_gil;
  const std::lock_guard lock(mutex_);
  return backwards_.any();
}

// ---- DistributedDataParallel ----

// The reducer registers its hook on the accumulator as a LambdaPostHook.
bool is_reduced_by_ddp(const NodePtr& accumulator) {
  if (!accumulator) return false;
  for (const auto& hook : accumulator->post_hooks()) {
    if (dynamic_cast<torch::autograd::utils::LambdaPostHook*>(hook.get())) return true;
  }
  return false;
}

std::shared_ptr<Backward> Collector::current_backward() {
  const py::gil_scoped_release no_gil;
  return backwards_.begin(*this);
}

void Collector::check_reduced(const py::list& params) {
  lock();
  const std::unique_lock locked(mutex_, std::adopt_lock);
  for (const py::handle param : params) {
    const auto entry = entry_of(param);
    if (!entry) continue;
    const Tensor& tensor = THPVariable_Unpack(param.ptr());
    stepper().attr("check_gradient")(name_of(*entry, tensor), is_stepped(*entry),
                                     entry->measured == number_);
    entry->has_local_gradient = false;
  }
}

void Collector::hand_to_ddp(const py::list& params, bool enabled) const {
  for (const py::handle param : params) {
    if (const auto entry = entry_of(param)) entry->reduced_by_ddp = enabled;
  }
}

// ---- streams ----

c10::Stream Collector::stream_beside(const c10::Stream& stream) {
  const auto known = streams_beside_.find(stream.device());
  if (known != streams_beside_.end()) return known->second;
  const c10::impl::VirtualGuardImpl guard(stream.device_type());
  const c10::Stream made = guard.getStreamFromGlobalPool(stream.device());
  return streams_beside_.emplace(stream.device(), made).first->second;
}

void Collector::wait_for_streams_beside() const {
  for (const auto& [device, stream] : streams_beside_) {
    order_after(*current_stream(device), stream);
  }
}

}  // namespace memsave_ext::adam
