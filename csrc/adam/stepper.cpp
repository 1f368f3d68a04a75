#include "adam/stepper.h"

#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/autograd/utils/lambda_post_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <map>

#include "adam/backward.h"
#include "adam/dtensor.h"
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

void Stepper::attach(const py::list& params) {
  for (const py::handle param : params) {
    const Stepper* stepper = find_hook(param).stepper;
    TORCH_CHECK_VALUE(stepper == nullptr || stepper == this, "a parameter of shape ",
                      THPVariable_Unpack(param.ptr()).sizes(),
                      " is stepped in backward by another optimizer already: call its "
                      "remove_hooks() first, or let each parameter be in one optimizer");
  }
  for (const py::handle param : params) {
    if (find_hook(param).stepper == nullptr) {
      install_hook(py::reinterpret_borrow<py::object>(param), shared_from_this());
    }
  }
  attached_ = true;
}

void Stepper::detach() {
  attached_ = false;
  for_parameters([&](const py::handle& param) {
    if (find_hook(param).stepper == this) remove_hook(param);
  });
}

int64_t Stepper::attach_lost() {
  if (!attached_) return 0;
  py::list lost;
  for_parameters([&](const py::handle& param) {
    if (find_hook(param).stepper != this) lost.append(param);
  });
  attach(lost);
  return static_cast<int64_t>(lost.size());
}

std::shared_ptr<Snapshot> Stepper::take_snapshot() {
  const py::gil_scoped_acquire gil;
  const py::object owner = optimizer();
  if (owner.is_none()) return nullptr;
  auto snapshot = std::make_shared<Snapshot>(read_optimizer(owner));
  for (size_t i = 0; i < snapshot->parameters.size(); ++i) {
    auto& parameter = snapshot->parameters[i];
    const auto param = py::reinterpret_steal<py::object>(THPVariable_Wrap(parameter.tensor));
    parameter.entry = own_entry(param);
    if (!parameter.entry) continue;
    parameter.entry->snapshot = snapshot.get();
    parameter.entry->position = i;
  }
  return snapshot;
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
  std::shared_ptr<Snapshot> snapshot;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (auto backward = find()) return backward;
    snapshot = snapshot_.lock();  // of an outer backward that is under way
  }
  if (!snapshot) snapshot = take_snapshot();
  if (!snapshot) return nullptr;
  std::shared_ptr<Backward> backward;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (auto other = find()) return other;  // of another device's thread
    backward = std::make_shared<Backward>(shared_from_this(), snapshot);
    snapshot_ = snapshot;
    backwards_.erase(std::remove_if(backwards_.begin(), backwards_.end(),
                                    [](const auto& other) { return other.second.expired(); }),
                     backwards_.end());
    backwards_.emplace_back(task, backward);
  }
  // Held by the graph task alone: an error drops it unfinished.
  torch::autograd::Engine::get_default_engine().queue_callback([backward] { backward->finish(); });
  return backward;
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
  TORCH_CHECK(entry.step != step_, "Adam: ", name(entry, param),
              " receives a second gradient in one step. Either backward() ran twice before "
              "opt.step(): put `with opt.accumulate():` around all but the last. Or it is used in "
              "several regions of torch.utils.checkpoint(use_reentrant=True), which deliver their "
              "gradients one by one: use use_reentrant=False, or memsave_ext.checkpoint.");
}

void Stepper::check_not_forbidden() const {
  TORCH_CHECK(!forbidden_,
              "Adam: the closure given to step() runs a backward, which with in_backward=True "
              "steps the parameters itself. Call backward() first, and then step() without it.");
}

std::shared_ptr<Entry> Stepper::own_entry(const py::handle& param) const {
  const Attachment attachment = find_hook(param);
  return attachment.stepper == this ? attachment.entry : nullptr;
}

void Stepper::ready(Entry& entry, const Tensor& param, const Tensor& grad, bool may_step) {
  if (!grad.defined()) return;
  if (entry.reduced_by_ddp) {
    entry.has_local_gradient = true;
    return;
  }
  if (accumulating_ > 0) return;
  if (torch::autograd::get_current_graph_task_id() == -1) return;  // step() will apply it
  check_not_forbidden();
  TORCH_CHECK(!is_reduced_by_ddp(param), "Adam: a parameter of shape ", param.sizes(),
              " belongs to a DistributedDataParallel module, which reduces its gradient after it "
              "would be stepped here. Call opt.attach(ddp) once, before training.");
  const auto backward = current_backward();
  if (!backward) return;  // the optimizer is gone
  const std::lock_guard<std::mutex> lock(mutex_);
  check_not_failed();
  if (entry.snapshot != backward->snapshot().get()) return;  // not in param_groups any more
  check_not_stepped(entry, param);
  backward->add(entry, grad, may_step);
}

void Stepper::hand_to_ddp(const py::list& params, bool enabled) {
  for (const py::handle param : params) {
    if (const auto entry = own_entry(param)) entry->reduced_by_ddp = enabled;
  }
}

std::shared_ptr<Backward> Stepper::begin_reduced(const py::list& params) {
  check_not_forbidden();
  TORCH_CHECK(accumulating_ == 0,
              "Adam: opt.accumulate() around a backward whose gradients DistributedDataParallel "
              "reduces. Use `with ddp.no_sync(), opt.accumulate():`.");
  std::vector<std::shared_ptr<Entry>> entries;
  std::vector<Tensor> tensors;
  for (const py::handle param : params) {
    entries.push_back(own_entry(param));
    tensors.push_back(THPVariable_Unpack(param.ptr()));
  }
  const py::gil_scoped_release no_gil;
  auto backward = current_backward();
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

int64_t Stepper::step() {
  bool any = false;
  for_parameters([&](const py::handle& param) {
    any = any || THPVariable_Unpack(param.ptr()).grad().defined();
  });
  if (!any) {
    const py::gil_scoped_release no_gil;
    const std::lock_guard<std::mutex> lock(mutex_);
    check_not_failed();
    ++step_;
    return std::exchange(stepped_, 0);
  }
  return step_remaining();
}

int64_t Stepper::step_remaining() {
  {
    const py::gil_scoped_release no_gil;
    const std::lock_guard<std::mutex> lock(mutex_);
    check_not_failed();
  }
  const auto snapshot = take_snapshot();
  TORCH_CHECK(snapshot, "Adam: the optimizer is gone");
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
    // By device: each has its kernels.
    std::map<std::pair<c10::DeviceType, c10::DeviceIndex>, std::vector<Update>> updates;
    std::vector<const Parameter*> with_gradient;
    for (size_t i = 0; i < grads.size(); ++i) {
      auto& parameter = snapshot->parameters[i];
      if (!grads[i].defined()) continue;
      with_gradient.push_back(&parameter);
      if (const Entry* entry = parameter.entry.get()) {
        if (entry->reduced_by_ddp && entry->step == step_) continue;  // what the reducer left
        TORCH_CHECK(!entry->has_local_gradient, "Adam: the gradient of ",
                    name(*entry, parameter.tensor),
                    " has not been reduced over the processes. The last backward of a step must "
                    "be outside of ddp.no_sync().");
        TORCH_CHECK(entry->step != step_, "Adam: ", name(*entry, parameter.tensor),
                    " was stepped in backward and has a gradient again, which would be a second "
                    "step. Set .grad before backward(), or after step().");
      }
      const auto device = parameter.local.device();
      updates[{device.type(), device.index()}].push_back(checked_update(parameter, grads[i]));
    }
    for (const auto& [device, of_device] : updates) step_all(of_device);
    if (attached_) {
      for (const Parameter* parameter : with_gradient) parameter->tensor.mutable_grad().reset();
    }
    for (const auto& [device, of_device] : updates) stepped_ += of_device.size();
    ++step_;
    stepped = std::exchange(stepped_, 0);
    fresh = snapshot->take_fresh();
  }
  const py::gil_scoped_acquire gil;
  publish_states(fresh, optimizer());
  return stepped;
}

void Stepper::zero_grad(bool to_none) {
  if (to_none) {
    for_parameters(
        [](const py::handle& param) { THPVariable_Unpack(param.ptr()).mutable_grad().reset(); });
  }
  const py::gil_scoped_release no_gil;
  const std::lock_guard<std::mutex> lock(mutex_);
  if (stepped_before_failure_ == 0) return;
  stepped_before_failure_ = 0;
  ++step_;
}

}  // namespace memsave_ext::adam
