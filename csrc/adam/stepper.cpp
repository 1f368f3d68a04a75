#include "adam/stepper.h"

#include <ATen/ops/ones_like.h>
#include <torch/csrc/PyInterpreter.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <set>
#include <utility>
#include <vector>

#include "adam/backward.h"
#include "adam/ddp.h"
#include "adam/dtensor.h"
#include "adam/given.h"
#include "adam/grad_lock.h"
#include "adam/hook.h"
#include "adam/scaling.h"

namespace memsave_ext::adam {

namespace py = pybind11;
using at::Tensor;

Stepper::Stepper(const py::object& optimizer, int64_t small_bytes, int64_t bucket_bytes,
                 bool own_step)
    : optimizer_(py::weakref(optimizer)),
      small_bytes_(small_bytes),
      bucket_bytes_(bucket_bytes),
      algorithm_(own_step ? Algorithm::kOwn : Algorithm::kRule) {}

Stepper::~Stepper() {
  if (!Py_IsInitialized()) {
    optimizer_.release();
    return;
  }
  const py::gil_scoped_acquire gil;
  optimizer_ = py::object();
}

py::object Stepper::optimizer() const { return optimizer_(); }

template <typename Body>
void Stepper::for_parameters(const Body& body) const {
  const py::object owner = optimizer();
  if (owner.is_none()) return;
  for (const py::handle group : owner.attr("param_groups")) {
    for (const py::handle param : group["params"]) body(param);
  }
}

bool Stepper::any_gradient() const {
  bool any = false;
  for_parameters([&](const py::handle& param) {
    any = any || THPVariable_Unpack(param.ptr()).grad().defined();
  });
  return any;
}

std::vector<Tensor> Stepper::sharded() const {
  std::vector<Tensor> of_each;
  std::set<int64_t> known = {0};  // whole parameters take no collective
  for_parameters([&](const py::handle& param) {
    if (!is_dtensor(param)) return;
    const Tensor& tensor = THPVariable_Unpack(param.ptr());
    if (known.insert(sharding_of(tensor).number).second) of_each.push_back(tensor);
  });
  return of_each;
}

py::object Stepper::owner(const py::object& param) {
  const auto [stepper, entry] = find_hook(param);
  if (stepper == nullptr) return py::none();
  py::object optimizer = stepper->optimizer();
  if (optimizer.is_none()) remove_hook(param);
  return optimizer;
}

void Stepper::attach(const py::list& params) {
  for (const py::handle handle : params) {
    const auto param = py::reinterpret_borrow<py::object>(handle);
    if (owner(param).is_none()) install_hook(param, shared_from_this());
  }
  attached_ = true;
}

void Stepper::detach() {
  attached_ = false;
  for_parameters([&](const py::handle& param) {
    if (find_hook(param).stepper == this) remove_hook(param);
  });
}

py::list Stepper::lost() const {
  py::list lost;
  if (!attached_) return lost;
  for_parameters([&](const py::handle& param) {
    if (find_hook(param).stepper != this) lost.append(param);
  });
  return lost;
}

std::shared_ptr<Snapshot> Stepper::take_snapshot() const {
  const py::gil_scoped_acquire gil;
  const py::object owner = optimizer();
  if (owner.is_none()) return nullptr;
  auto snapshot = std::make_shared<Snapshot>(read_optimizer(owner, algorithm_));
  if (algorithm_ == Algorithm::kOwn) {
    snapshot->owner.emplace(py::object(owner).release().ptr(), getPyInterpreter());
  }
  for (auto& parameter : snapshot->parameters) {
    const auto param = py::reinterpret_steal<py::object>(THPVariable_Wrap(parameter.tensor));
    parameter.entry = entry_of(param);
  }
  return snapshot;
}

GradientAction Stepper::next_action() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (open_step_.state() == StepState::kMeasuring) return GradientAction::kMeasure;
  }
  if (blocks_.any(Block::kFold)) return GradientAction::kFold;
  if (!asks_) return GradientAction::kStep;
  const py::gil_scoped_acquire gil;
  const py::object owner = optimizer();
  if (owner.is_none()) return GradientAction::kStep;
  const auto answer = owner.attr("_on_gradients")().cast<std::string>();
  return answer == "fold"   ? GradientAction::kFold
         : answer == "keep" ? GradientAction::kKeep
                            : GradientAction::kStep;
}

std::shared_ptr<Entry> Stepper::entry_of(const py::handle& param) const {
  const Attachment attachment = find_hook(param);
  return attachment.stepper == this ? attachment.entry : nullptr;
}

void Stepper::ready(Entry& entry, const Tensor& param, bool may_step, const Tensor& local_grad) {
  if (blocks_.any(Block::kKeep)) return;
  const NodePtr accumulator = torch::autograd::impl::grad_accumulator(param);
  if (blocks_.any(Block::kDrop)) {
    if (!may_step) return;  // later hooks are still to see it
    const GradLock lock(accumulator);
    param.mutable_grad().reset();
    return;
  }
  const bool folds = blocks_.any(Block::kFold);
  if (entry.reduced_by_ddp) {
    const GradLock lock(accumulator);
    if (!param.mutable_grad().defined()) return;
    if (folds) throw_error("folds_unreduced");
    entry.has_local_gradient = true;
    return;
  }
  if (blocks_.any(Block::kAccumulate) && !folds) return;
  if (is_reduced_by_ddp(accumulator)) throw_error("not_attached", param);
  std::shared_ptr<Backward> backward;
  std::unique_lock<std::mutex> lock(mutex_);
  if (!(backward = backwards_.current())) {
    lock.unlock();
    if (!(backward = backwards_.begin(*this))) return;
    lock.lock();
  }
  if (backward->action() == GradientAction::kKeep) return open_step_.check(Event::kKeepGradients);
  open_step_.check(Event::kUseGradient);
  if (!backward->has(entry)) return;  // not in param_groups any more
  backward->add(entry, accumulator, local_grad, may_step);
}

c10::Stream Stepper::stream_beside(const c10::Stream& stream) {
  const auto known = streams_beside_.find(stream.device());
  if (known != streams_beside_.end()) return known->second;
  const c10::impl::VirtualGuardImpl guard(stream.device_type());
  const c10::Stream made = guard.getStreamFromGlobalPool(stream.device());
  return streams_beside_.emplace(stream.device(), made).first->second;
}

void Stepper::wait_for_streams_beside() const {
  for (const auto& [device, stream] : streams_beside_) {
    order_after(*current_stream(device), stream);
  }
}

void Stepper::count_block(Block block, bool opens) {
  if (opens && block != Block::kDrop) {
    const py::gil_scoped_release no_gil;
    const std::lock_guard<std::mutex> lock(mutex_);
    open_step_.check(Event::kKeepGradients);
  }
  blocks_.count(block, opens);
}

void Stepper::accumulate(bool enabled, bool fold) {
  count_block(fold ? Block::kFold : Block::kAccumulate, enabled);
}

void Stepper::pause(bool enabled, bool keep) {
  count_block(keep ? Block::kKeep : Block::kDrop, enabled);
}

void Stepper::begin_norm_pass() {
  if (any_gradient() || blocks_.any(Block::kAccumulate) || blocks_.any(Block::kFold)) {
    throw_error("measures_sums");
  }
  const py::gil_scoped_release no_gil;
  const std::lock_guard<std::mutex> lock(mutex_);
  open_step_.begin_norm_pass();
}

void Stepper::end_norm_pass(const py::object& max_norm) {
  std::optional<double> norm;
  if (!max_norm.is_none()) norm = max_norm.cast<double>();
  Tensor grad_scale;
  if (const py::object owner = optimizer(); !owner.is_none()) grad_scale = read_grad_scale(owner);
  const std::vector<Tensor> of_each_sharding = sharded();
  const py::gil_scoped_release no_gil;
  const std::lock_guard<std::mutex> lock(mutex_);
  open_step_.end_norm_pass(norm, grad_scale, of_each_sharding);
}

int64_t Stepper::folded() {
  const py::gil_scoped_release no_gil;
  const std::lock_guard<std::mutex> lock(mutex_);
  return open_step_.folded();
}

void Stepper::drop_stale_low_part(const Tensor& param, const Tensor& low_part) {
  const py::gil_scoped_release no_gil;
  const std::lock_guard<std::mutex> lock(mutex_);
  open_step_.drop_stale_low_part(param, low_part);
}

int64_t Stepper::count_used(const py::list& params) {
  std::vector<std::shared_ptr<Entry>> entries;
  for (const py::handle param : params) entries.push_back(entry_of(param));
  const py::gil_scoped_release no_gil;
  const std::lock_guard<std::mutex> lock(mutex_);
  return std::count_if(entries.begin(), entries.end(), [&](const auto& entry) {
    return entry != nullptr && entry->waits_in == nullptr && open_step_.is_used(*entry);
  });
}

py::object Stepper::grad_norm() {
  Tensor norm;
  {
    const py::gil_scoped_release no_gil;
    const std::lock_guard<std::mutex> lock(mutex_);
    norm = open_step_.grad_norm();
  }
  if (!norm.defined()) return py::none();
  return py::reinterpret_steal<py::object>(THPVariable_Wrap(norm));
}

py::list Stepper::found_inf() const {
  py::list tensors;
  for (const Tensor& found_inf : open_step_.found_inf()) {
    tensors.append(py::reinterpret_steal<py::object>(THPVariable_Wrap(found_inf)));
  }
  return tensors;
}

void Stepper::drop_gradients() const {
  for_parameters([](const py::handle& param) {
    const Tensor& tensor = THPVariable_Unpack(param.ptr());
    // A parameter that never required a gradient has no place for one either.
    if (tensor.grad().defined()) tensor.mutable_grad().reset();
  });
}

void Stepper::zero_grad(bool to_none) {
  if (to_none) drop_gradients();
  const py::gil_scoped_release no_gil;
  const std::lock_guard<std::mutex> lock(mutex_);
  open_step_.acknowledge();
}

void Stepper::begin_loading() {
  const py::gil_scoped_release no_gil;
  const std::lock_guard<std::mutex> lock(mutex_);
  backwards_.check_none("load_state_dict()");
}

void Stepper::end_loading() {
  if (attached_) {
    drop_gradients();
    for_parameters([&](const py::handle& param) {
      if (const auto entry = entry_of(param)) entry->has_local_gradient = false;
    });
  }
  const py::gil_scoped_release no_gil;
  const std::lock_guard<std::mutex> lock(mutex_);
  open_step_.restart();
}

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
