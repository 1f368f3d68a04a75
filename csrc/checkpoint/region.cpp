#include "checkpoint/region.h"

#include <ATen/SequenceNumber.h>
#include <c10/core/AutogradState.h>
#include <torch/csrc/PyInterpreter.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <atomic>

#include "checkpoint/call.h"
#include "checkpoint/hooks.h"
#include "checkpoint/mismatch.h"
#include "checkpoint/tail.h"
#include "compat.h"

namespace memsave_ext {

namespace py = pybind11;
using torch::autograd::SavedVariable;

BackwardKey BackwardKey::current() {
  // Under torch.utils.checkpoint.GraphExecGroup several backwards share one recompute.
  const auto& group = c10::AutogradState::get_tls_state().get_graph_exec_group();
  if (group) {
    return {kGroup, reinterpret_cast<int64_t>(group->ptr(getPyInterpreter()))};
  }
  const int64_t task = torch::autograd::get_current_graph_task_id();
  if (task != -1) return {kGraphTask, task};
  static std::atomic<int64_t> opened_outside{0};
  return {kNone, opened_outside++};
}

Region::Region(py::object recompute_function, py::object kwargs, py::object on_error,
               RegionOptions options)
    : recompute_function_(std::move(recompute_function)),
      kwargs_(std::move(kwargs)),
      on_error_(std::move(on_error)),
      options_(options),
      stop_at_last_save_(options.early_stop) {}

void Region::save_arguments(PyObject* arguments) {
  const Py_ssize_t count = PyTuple_GET_SIZE(arguments);
  arguments_.reserve(count);
  for (Py_ssize_t i = 0; i < count; ++i) {
    PyObject* argument = PyTuple_GET_ITEM(arguments, i);
    if (THPVariable_Check(argument)) {
      arguments_.push_back({SavedVariable(THPVariable_Unpack(argument), /*is_output=*/false), {}});
    } else {
      arguments_.push_back({SavedVariable(), py::reinterpret_borrow<py::object>(argument)});
    }
  }
}

void Region::save_surroundings() {
  surroundings_ = {AutocastState::capture(), std::nullopt, current_cuda_stream()};
  if (options_.preserve_rng_state) surroundings_.rng = RngState::capture();
}

void Region::finish_forward(PyObject* outputs) {
  forward_finished_ = true;
  if (surroundings_.rng && *surroundings_.rng == RngState::capture()) surroundings_.rng.reset();
  if (stop_at_last_save_ && !slots_.empty()) {
    stop_at_last_save_ = worth_stopping(last_save_sequence_nr_, last_save_numel_) &&
                         !last_save_is_filled_later(outputs, last_save_sequence_nr_);
  }
}

py::object Region::save(const at::Tensor& tensor) {
  const uint64_t sequence_nr = at::sequence_number::peek();
  if (sequence_nr != last_save_sequence_nr_) last_save_numel_ = 0;
  last_save_sequence_nr_ = sequence_nr;
  if (!tensor.is_nested()) last_save_numel_ = std::max(last_save_numel_, tensor.numel());

  py::object holder = make_holder(shared_from_this(), slots_.size());
  slots_.push_back({holder.ptr(), describe_sizes(tensor), tensor.scalar_type(), tensor.device(),
                    weak_storage(tensor), static_cast<uint32_t>(tensor._version())});
  return holder;
}

void Region::holder_died(size_t index) {
  slots_[index].holder = nullptr;
  for (auto& values : values_) {
    if (index < values.tensors.size()) values.tensors[index].reset();
  }
}

Region::Values* Region::find(const BackwardKey& key) {
  for (auto& values : values_) {
    if (values.key == key) return &values;
  }
  return nullptr;
}

void Region::forget(const BackwardKey& key) {
  values_.erase(std::remove_if(values_.begin(), values_.end(),
                               [&](const Values& values) { return values.key == key; }),
                values_.end());
}

at::Tensor Region::open(size_t index) {
  const auto key = BackwardKey::current();
  const auto take = [&]() -> at::Tensor {
    Values* values = find(key);
    if (values == nullptr || !values->tensors[index].defined()) return {};
    at::Tensor tensor = std::move(values->tensors[index]);
    const bool last = std::none_of(values->tensors.begin(), values->tensors.end(),
                                   [](const at::Tensor& other) { return other.defined(); });
    if (last || key.kind == BackwardKey::kNone) forget(key);
    return tensor;
  };
  if (at::Tensor tensor = take(); tensor.defined()) return tensor;

  TORCH_CHECK(
      recomputing_thread_ != std::this_thread::get_id(),
      "memsave_ext.checkpoint: the recompute of a region needs a tensor of the same region. "
      "The function runs a backward through a graph of an earlier call of itself.");
  const auto self = shared_from_this();  // a holder may die on the way
  std::unique_lock<std::mutex> lock(recompute_mutex_, std::try_to_lock);
  if (!lock.owns_lock()) {
    const py::gil_scoped_release no_gil;  // the thread that recomputes needs it
    lock.lock();
  }
  if (at::Tensor tensor = take(); tensor.defined()) return tensor;  // another thread was first
  recomputing_thread_ = std::this_thread::get_id();
  try {
    recompute(key);
  } catch (...) {
    recomputing_thread_ = {};
    forget(key);
    throw;
  }
  recomputing_thread_ = {};
  return take();
}

void Region::recompute(const BackwardKey& key) {
  py::tuple arguments(arguments_.size());
  for (size_t i = 0; i < arguments_.size(); ++i) {
    arguments[i] =
        arguments_[i].other
            ? arguments_[i].other
            : py::reinterpret_steal<py::object>(THPVariable_Wrap(arguments_[i].tensor.unpack()));
  }
  forget(key);
  values_.push_back({key, std::vector<at::Tensor>(slots_.size())});
  Recompute run(*this, key);
  PyObject* result;
  {
    const RecomputeGuard guard(surroundings_);
    const HookGuard hooks(make_packer(run));
    result = PyObject_Call(recompute_function_.ptr(), arguments.ptr(),
                           kwargs_.is_none() ? nullptr : kwargs_.ptr());
  }
  if (result == nullptr) {
    if (!run.stopped() || !PyErr_ExceptionMatches(stop_exception())) throw_python_error();
    PyErr_Clear();
  }
  Py_XDECREF(result);
  run.check();
}

Recompute::Recompute(Region& region, const BackwardKey& key) : region_(region), key_(key) {
  // A backward inside the function: the node that asks is, in practice, the last that saved.
  may_stop_ =
      region.stop_at_last_save_ &&
      (region.forward_finished_ || !fills_after_saving(*torch::autograd::get_current_node()));
  needed_ = region.slots_.size();
  while (needed_ > 0 && region.slots_[needed_ - 1].holder == nullptr) --needed_;
}

bool Recompute::save(const at::Tensor& tensor) {
  if (stopped_) return true;  // the function caught the exception that stops it
  const size_t index = count_++;
  if (index >= region_.slots_.size()) return true;
  if (may_stop_ && index == needed_) {
    // Nobody needs what is saved from here on, and the last operation that somebody needs has run:
    // only of the forward's very last save is it known that it may be stopped before.
    stopped_ = true;
    return false;
  }
  const Slot& slot = region_.slots_[index];
  if (region_.options_.check_determinism) {
    if (!same_metadata(slot, tensor)) different_ += describe_difference(index, slot, tensor);
    if (is_storage(slot, tensor) && static_cast<uint32_t>(tensor._version()) != slot.version) {
      mutated_ += describe_mutation(index, slot, tensor);
    }
  }
  if (slot.holder != nullptr) {
    region_.find(key_)->tensors[index] = tensor;
  }
  stopped_ = may_stop_ && index + 1 == region_.slots_.size();
  return !stopped_;
}

void Recompute::check() const {
  const auto fail = [&](const std::string& message) {
    throw_checkpoint_error(message, region_.on_error_);
  };
  const size_t saved = region_.slots_.size();
  if (!mutated_.empty()) fail(mutation_message(mutated_));
  if (!different_.empty()) fail(difference_message(different_));
  if (!region_.forward_finished_) return;  // a backward inside the function: it saves more later
  if (count_ > saved) fail(more_saved_message());
  if (!stopped_ && count_ < saved) fail(fewer_saved_message(saved, count_));
}

}  // namespace memsave_ext
