#include "adam/stepper.h"

#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/autograd/utils/lambda_post_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>

#include "adam/backward.h"
#include "adam/dtensor.h"
#include "adam/grad_lock.h"
#include "adam/hook.h"

namespace memsave_ext::adam {

namespace py = pybind11;
using at::Tensor;

namespace {

// The reducer's hook is what torch puts behind a parameter's gradient as a LambdaPostHook.
bool is_reduced_by_ddp(const Tensor& param) {
  const auto accumulator = torch::autograd::impl::try_get_grad_accumulator(param);
  if (!accumulator) return false;
  for (const auto& hook : accumulator->post_hooks()) {
    if (dynamic_cast<torch::autograd::utils::LambdaPostHook*>(hook.get())) return true;
  }
  return false;
}

}  // namespace

Stepper::Stepper(py::object optimizer, int64_t small_bytes, int64_t bucket_bytes)
    : optimizer_(py::weakref(optimizer)), small_bytes_(small_bytes), bucket_bytes_(bucket_bytes) {}

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

std::shared_ptr<Snapshot> Stepper::take_snapshot() {
  const py::gil_scoped_acquire gil;
  const py::object owner = optimizer();
  if (owner.is_none()) return nullptr;
  auto snapshot = std::make_shared<Snapshot>(read_optimizer(owner));
  for (auto& parameter : snapshot->parameters) {
    const auto param = py::reinterpret_steal<py::object>(THPVariable_Wrap(parameter.tensor));
    parameter.entry = own_entry(param);
  }
  return snapshot;
}

void Stepper::use_snapshot(const std::shared_ptr<Snapshot>& snapshot) {
  snapshot_ = snapshot;
  snapshot->number = ++snapshots_;
  for (size_t i = 0; i < snapshot->parameters.size(); ++i) {
    const auto& entry = snapshot->parameters[i].entry;
    if (!entry) continue;
    entry->snapshot = snapshot->number;
    entry->position = i;
  }
}

std::shared_ptr<Backward> Stepper::current_backward() {
  const int64_t task = torch::autograd::get_current_graph_task_id();
  const auto find = [&]() -> std::shared_ptr<Backward> {
    // Only this thread's own is made strong here: none may die with the mutex held.
    for (const auto& [of_task, backward] : backwards_) {
      if (of_task == task) return backward.lock();
    }
    return nullptr;
  };
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (auto backward = find()) return backward;
  }
  const Task use = next_task();
  std::shared_ptr<Backward> backward;
  while (!backward) {
    std::shared_ptr<Snapshot> taken, other;  // no tensor of theirs may die with the mutex held
    uint64_t ended;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      taken = snapshot_.lock();  // of an outer backward that is under way
      ended = ended_;
    }
    if (!taken) taken = take_snapshot();
    if (!taken) return nullptr;
    const std::lock_guard<std::mutex> lock(mutex_);
    if (auto of_another_devices_thread = find()) return of_another_devices_thread;
    other = snapshot_.lock();
    if (other) {  // another thread's backward has begun meanwhile: they share one
      taken.swap(other);
    } else if (ended != ended_) {  // or has ended, whose states are not in it
      continue;
    } else {
      use_snapshot(taken);
    }
    backward = std::make_shared<Backward>(shared_from_this(), taken, use);
    ++running_;
    backwards_.erase(std::remove_if(backwards_.begin(), backwards_.end(),
                                    [](const auto& of) { return of.second.expired(); }),
                     backwards_.end());
    backwards_.emplace_back(task, backward);
  }
  // Held by the graph task alone: an error drops it unfinished.
  torch::autograd::Engine::get_default_engine().queue_callback([backward] { backward->finish(); });
  return backward;
}

Task Stepper::next_task() {
  if (measuring_) return Task::kMeasure;
  if (folding_ > 0) return Task::kFold;
  if (!asks_) return Task::kStep;
  const py::gil_scoped_acquire gil;
  const py::object owner = optimizer();
  if (owner.is_none()) return Task::kStep;
  const auto answer = owner.attr("_on_gradients")().cast<std::string>();
  return answer == "fold" ? Task::kFold : answer == "keep" ? Task::kAccumulate : Task::kStep;
}

std::string Stepper::name(const Entry& entry, const Tensor& param) {
  return c10::str("parameter ", entry.position, " of the optimizer (shape ", param.sizes(), ")");
}

void Stepper::check_not_failed() {
  TORCH_CHECK(stepped_before_failure_ == 0, "Adam: a backward raised after ",
              stepped_before_failure_,
              " parameters had been stepped; the others were not. Call zero_grad() to go on from "
              "there, or load a checkpoint.");
}

void Stepper::check_not_stepped(const Entry& entry, const Tensor& param) {
  const bool again = measuring_ ? entry.measured == step_ : entry.step == step_;
  TORCH_CHECK(
      !again, "Adam: ", name(entry, param),
      " receives a second gradient in one step. Either backward() ran twice before "
      "opt.step(): put `with opt.accumulate():` around all but the last, or, where a "
      "trainer runs it, call opt.accumulate_when() once. Or one of them was of a loss that is not "
      "to train this parameter, as a GAN's generator's for the discriminator: put `with "
      "opt.paused():` around it. Or the parameter is used in several regions of "
      "torch.utils.checkpoint(use_reentrant=True), which deliver their gradients one by one: use "
      "use_reentrant=False, or memsave_ext.checkpoint.");
  TORCH_CHECK(measuring_ || !norm_ || entry.measured == step_, "Adam: ", name(entry, param),
              " has a gradient now, but had none in norm_pass(), whose norm it would be clipped "
              "by. Both must run the backward of the same loss.");
}

void Stepper::check_accumulates_after_no_norm() const {
  TORCH_CHECK(!norm_,
              "Adam: gradients are accumulated after norm_pass(), whose norm is that of one "
              "backward. Use clip_global_norm=, which clips the sum.");
}

std::shared_ptr<Entry> Stepper::own_entry(const py::handle& param) const {
  const Attachment attachment = find_hook(param);
  return attachment.stepper == this ? attachment.entry : nullptr;
}

void Stepper::ready(Entry& entry, const Tensor& param, bool may_step, const Tensor& local_grad) {
  if (!local_grad.defined()) {
    const GradLock lock(param);
    if (!param.grad().defined()) return;
  }
  if (keeping_ > 0) return;
  if (dropping_ > 0) {
    if (!may_step) return;  // to be seen by others
    const GradLock lock(param);
    param.mutable_grad().reset();
    return;
  }
  const bool folds = folding_ > 0;
  if (entry.reduced_by_ddp) {
    TORCH_CHECK(!folds,
                "Adam: accumulate(fold=True) would fold gradients of one process, which "
                "DistributedDataParallel has not reduced. Use accumulate().");
    entry.has_local_gradient = true;
    return;
  }
  if (accumulating_ > 0 && !folds) return;
  if (torch::autograd::get_current_graph_task_id() == -1) return;  // step() will apply it
  TORCH_CHECK(!is_reduced_by_ddp(param), "Adam: a parameter of shape ", param.sizes(),
              " belongs to a DistributedDataParallel module, which reduces its gradient after it "
              "would be stepped here. Call opt.attach(ddp) once, before training.");
  const auto backward = current_backward();
  if (!backward) return;  // the optimizer is gone
  const std::lock_guard<std::mutex> lock(mutex_);
  if (backward->task() == Task::kAccumulate) return check_accumulates_after_no_norm();
  check_not_failed();
  if (entry.snapshot != backward->snapshot()->number) return;  // not in param_groups any more
  try {
    check_not_stepped(entry, param);
  } catch (...) {
    backward->forget_waiting(entry);
    throw;
  }
  backward->add(entry, local_grad, may_step);
}

void Stepper::accumulate(bool enabled, bool fold) {
  if (enabled) {
    const py::gil_scoped_release no_gil;
    const std::lock_guard<std::mutex> lock(mutex_);
    check_accumulates_after_no_norm();
  }
  (fold ? folding_ : accumulating_) += enabled ? 1 : -1;
}

void Stepper::pause(bool enabled, bool keep) {
  if (enabled && keep) {
    const py::gil_scoped_release no_gil;
    const std::lock_guard<std::mutex> lock(mutex_);
    check_accumulates_after_no_norm();
  }
  (keep ? keeping_ : dropping_) += enabled ? 1 : -1;
}

int64_t Stepper::folded() {
  const py::gil_scoped_release no_gil;
  const std::lock_guard<std::mutex> lock(mutex_);
  return records_.folded();
}

int64_t Stepper::count_used(const py::list& params) {
  std::vector<std::shared_ptr<Entry>> entries;
  for (const py::handle param : params) entries.push_back(own_entry(param));
  const py::gil_scoped_release no_gil;
  const std::lock_guard<std::mutex> lock(mutex_);
  return std::count_if(entries.begin(), entries.end(), [&](const auto& entry) {
    return entry != nullptr && (entry->step == step_ || entry->folded == step_);
  });
}

py::object Stepper::grad_norm() {
  Tensor norm;
  {
    const py::gil_scoped_release no_gil;
    const std::lock_guard<std::mutex> lock(mutex_);
    norm = norm_ && norm_->norm().defined() ? norm_->norm() : last_norm_;
  }
  if (!norm.defined()) return py::none();
  return py::reinterpret_steal<py::object>(THPVariable_Wrap(norm));
}

py::list Stepper::found() {
  py::list tensors;
  for (const Tensor& found : last_found_) {
    tensors.append(py::reinterpret_steal<py::object>(THPVariable_Wrap(found)));
  }
  return tensors;
}

void Stepper::hand_to_ddp(const py::list& params, bool enabled) {
  for (const py::handle param : params) {
    if (const auto entry = own_entry(param)) entry->reduced_by_ddp = enabled;
  }
}

std::shared_ptr<Backward> Stepper::begin_reduced(const py::list& params) {
  std::vector<std::shared_ptr<Entry>> entries;
  std::vector<Tensor> tensors;
  for (const py::handle param : params) {
    entries.push_back(own_entry(param));
    tensors.push_back(THPVariable_Unpack(param.ptr()));
  }
  TORCH_CHECK(keeping_ == 0,
              "Adam: opt.paused(keep=True) around a backward whose gradients "
              "DistributedDataParallel reduces. Use `with ddp.no_sync(), opt.paused(keep=True):`.");
  if (dropping_ > 0) return nullptr;
  const py::gil_scoped_release no_gil;
  auto backward = current_backward();
  TORCH_CHECK(
      accumulating_ == 0 && !(backward && backward->task() == Task::kAccumulate),
      "Adam: opt.accumulate() around a backward whose gradients DistributedDataParallel "
      "reduces, or accumulate_when() says so. Use `with ddp.no_sync(), opt.accumulate():`.");
  const std::lock_guard<std::mutex> lock(mutex_);
  check_not_failed();
  for (size_t i = 0; i < entries.size(); ++i) {
    if (!entries[i]) continue;
    check_not_stepped(*entries[i], tensors[i]);
    entries[i]->has_local_gradient = false;
  }
  return backward;
}

void Stepper::step_reduced(const std::shared_ptr<Backward>& backward, const py::list& params,
                           const py::list& grads) {
  if (!backward) return;  // the optimizer is gone
  std::vector<std::shared_ptr<Entry>> kept;
  std::vector<Entry*> entries;
  std::vector<Tensor> of_entries;
  for (size_t i = 0; i < py::len(grads); ++i) {
    if (auto entry = own_entry(params[i])) {
      entries.push_back(entry.get());
      kept.push_back(std::move(entry));
      of_entries.push_back(THPVariable_Unpack(grads[i].ptr()));
    }
  }
  const py::gil_scoped_release no_gil;
  backward->step_reduced(entries, of_entries);
}

void Stepper::zero_grad(bool to_none) {
  if (to_none) {
    for_parameters([](const py::handle& param) {
      const Tensor& tensor = THPVariable_Unpack(param.ptr());
      // One that never required a gradient has no place for it either.
      if (tensor.grad().defined()) tensor.mutable_grad().reset();
    });
  }
  const py::gil_scoped_release no_gil;
  const std::lock_guard<std::mutex> lock(mutex_);
  if (stepped_before_failure_ == 0) return;
  stepped_before_failure_ = 0;
  end_step();
}

}  // namespace memsave_ext::adam
