#include "checkpoint/region.h"

#include <ATen/SequenceNumber.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/AutogradState.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/PyInterpreter.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <atomic>
#include <utility>
#include <vector>

#include "checkpoint/call.h"
#include "checkpoint/early_stop.h"
#include "checkpoint/hooks.h"
#include "compat.h"
#include "locks.h"

namespace memsave_ext::checkpoint {

namespace py = pybind11;

Slot Slot::of(const at::Tensor& tensor) {
  return {0, Metadata::of(tensor), weak_storage(tensor), static_cast<uint32_t>(tensor._version())};
}

bool Slot::is_storage_of(const at::Tensor& tensor) const {
  return tensor.has_storage() &&
         storage._unsafe_get_target() == tensor.storage().unsafeGetStorageImpl();
}

RegionArgument RegionArgument::of(PyObject* argument) {
  if (!THPVariable_Check(argument)) {
    return {{}, weak_storage({}), 0, false, py::reinterpret_borrow<py::object>(argument)};
  }
  const at::Tensor& tensor = THPVariable_Unpack(argument);
  return {save_input(tensor), weak_storage(tensor), version_of(tensor), tensor.requires_grad(), {}};
}

at::Tensor RegionArgument::unpack() const {
  const py::gil_scoped_release no_gil;
  at::Tensor found = tensor.unpack();
  // A leaf's may have been changed. What autograd saves depends on what needs a gradient.
  if (found.requires_grad() != requires_grad) {
    found = detached(found);
    found.set_requires_grad(requires_grad);
  }
  return found;
}

std::optional<std::pair<uint32_t, uint32_t>> RegionArgument::change(const at::Tensor& now) const {
  const bool same = now.defined() && now.has_storage() &&
                    storage._unsafe_get_target() == now.storage().unsafeGetStorageImpl();
  if (!same || version_of(now) == version) return std::nullopt;
  return std::make_pair(version, version_of(now));
}

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
    PyObject* const argument = PyTuple_GET_ITEM(arguments, i);
    arguments_.push_back(RegionArgument::of(argument));
    if (THPVariable_Check(argument)) devices_.add(THPVariable_Unpack(argument));
  }
}

void Region::save_surroundings() {
  surroundings_ = {Settings::capture(), AutocastState::capture(), nullptr, current_cuda_stream()};
  if (options_.preserve_rng_state) {
    surroundings_.rng = std::make_shared<RngState>(CudaDevices::all());
  }
}

std::vector<PyObject*> Region::roots() const {
  std::vector<PyObject*> roots;
  for (const auto& argument : arguments_) {
    if (argument.other) roots.push_back(argument.other.ptr());
  }
  if (!kwargs_.is_none()) roots.push_back(kwargs_.ptr());
  roots.push_back(recompute_function_.ptr());
  return roots;
}

void Region::note_outside() {
  if (!options_.check_determinism) return;
  const auto generators = outside_.note(roots());
  if (surroundings_.rng) surroundings_.rng->add(generators);
}

void Region::finish_forward(PyObject* outputs) {
  forward_finished_ = true;
  if (surroundings_.rng) {
    surroundings_.rng->forget_unused_capture();
    devices_.add(outside_.devices());
    for (const Slot& slot : slots_) devices_.add(slot.metadata.device);
    surroundings_.rng->keep(devices_);
  }
  if (!slots_.empty()) {
    if (options_.check_determinism) outside_.leave_out_changes_of_forward(roots());
    pending_.emplace();
  }
  if (stop_at_last_save_ && !slots_.empty()) {
    // If the function changes the last saved tensor after it was saved, the recompute must stop at
    // the save: running on, it would change it again.
    const bool is_changed = last_save_version_.enabled() &&
                            last_save_version_.current_version() != slots_.back().version;
    stop_at_last_save_ =
        (is_changed || worth_stopping(last_save_sequence_nr_, last_save_numel_)) &&
        !last_save_is_filled_later(outputs, last_save_sequence_nr_, /*otherwise=*/!is_changed);
  }
}

Region::~Region() {
  if (!Py_IsInitialized()) {  // the interpreter takes its objects along
    recompute_function_.release();
    kwargs_.release();
    on_error_.release();
    for (auto& argument : arguments_) argument.other.release();
    return;
  }
  const py::gil_scoped_acquire gil;
  recompute_function_ = py::object();
  kwargs_ = py::object();
  on_error_ = py::object();
  arguments_.clear();
}

size_t Region::save(const at::Tensor& tensor) {
  Slot slot = Slot::of(tensor);
  const uint64_t sequence_nr = at::sequence_number::peek();
  const std::lock_guard<Lock> lock(state_mutex_);
  if (sequence_nr != last_save_sequence_nr_) last_save_numel_ = 0;
  last_save_sequence_nr_ = sequence_nr;
  last_save_version_ = tensor.unsafeGetTensorImpl()->version_counter();
  if (!tensor.is_nested()) last_save_numel_ = std::max(last_save_numel_, tensor.numel());
  slots_.push_back(std::move(slot));
  return slots_.size() - 1;
}

void Region::hold(size_t index) {
  const std::lock_guard<Lock> lock(state_mutex_);
  ++slots_[index].holders;
}

void Region::let_go(size_t index) {
  std::vector<at::Tensor> freed;
  const std::lock_guard<Lock> lock(state_mutex_);
  if (--slots_[index].holders > 0) return;
  for (auto& values : values_) {
    if (index < values.tensors.size()) freed.push_back(std::move(values.tensors[index]));
  }
}

std::vector<Region::Values>::iterator Region::find(const BackwardKey& key) {
  return std::find_if(values_.begin(), values_.end(),
                      [&](const Values& values) { return values.key == key; });
}

void Region::complete(const BackwardKey& key) {
  const std::lock_guard<Lock> lock(state_mutex_);
  if (const auto values = find(key); values != values_.end()) values->is_complete = true;
}

void Region::forget(const BackwardKey& key) {
  std::vector<at::Tensor> freed;
  const std::lock_guard<Lock> lock(state_mutex_);
  const auto values = find(key);
  if (values == values_.end()) return;
  freed = std::move(values->tensors);
  values_.erase(values);
}

at::Tensor Region::take(const BackwardKey& key, size_t index) {
  at::Tensor tensor;
  uint32_t version = 0;
  std::vector<at::Tensor> freed;
  {
    const std::lock_guard<Lock> lock(state_mutex_);
    const auto values = find(key);
    if (values == values_.end() || !values->is_complete) return tensor;
    if (index >= values->tensors.size()) return tensor;
    tensor = std::move(values->tensors[index]);
    if (!tensor.defined()) return tensor;
    version = values->versions[index];
    const bool last = std::none_of(values->tensors.begin(), values->tensors.end(),
                                   [](const at::Tensor& other) { return other.defined(); });
    if (last || key.kind == BackwardKey::kNone) {
      freed = std::move(values->tensors);
      values_.erase(values);
    }
  }
  // Without hooks autograd itself would compare the versions.
  if (options_.check_determinism && version_of(tensor) != version) {
    throw_error("value_changed", index, version, version_of(tensor), on_error_);
  }
  return tensor;
}

at::Tensor Region::open(size_t index) {
  const auto key = BackwardKey::current();
  if (at::Tensor tensor = take(key, index); tensor.defined()) return tensor;

  if (recomputing_thread_.load() == std::this_thread::get_id()) throw_error("needs_itself");
  std::unique_lock<Lock> lock(recompute_mutex_, std::try_to_lock);
  if (!lock.owns_lock()) {
    std::optional<py::gil_scoped_release> no_gil;
    if (PyGILState_Check()) no_gil.emplace();
    lock.lock();
    if (at::Tensor tensor = take(key, index); tensor.defined()) return tensor;
  }
  recomputing_thread_ = std::this_thread::get_id();
  try {
    recompute(key);
  } catch (...) {
    recomputing_thread_ = std::thread::id();
    forget(key);
    throw;
  }
  recomputing_thread_ = std::thread::id();
  complete(key);
  return take(key, index);
}

py::tuple Region::unpack_arguments() const {
  py::tuple arguments(arguments_.size());
  py::list changes;
  for (size_t i = 0; i < arguments_.size(); ++i) {
    const RegionArgument& argument = arguments_[i];
    if (argument.other) {
      arguments[i] = argument.other;
      continue;
    }
    const at::Tensor tensor = argument.unpack();
    if (const auto versions = argument.change(tensor)) {
      changes.append(py::make_tuple(i, versions->first, versions->second));
    }
    arguments[i] = py::reinterpret_steal<py::object>(THPVariable_Wrap(tensor));
  }
  if (options_.check_determinism && !changes.empty()) {
    throw_error("arguments_changed", changes, on_error_);
  }
  return arguments;
}

// One run of the function for its saved tensors.
class Recompute {
 public:
  Recompute(Region& region, const BackwardKey& key);

  // The recompute saves `tensor`. Returns false when it was the last one needed: time to stop.
  bool save(const at::Tensor& tensor);
  bool stopped() const { return stopped_; }
  // Throws where forward and recompute differ. `reads`: of tensors that have changed in between.
  void check(const std::vector<Read>& reads) const;

 private:
  struct Difference {
    size_t position;
    Metadata saved, recomputed;
  };
  // Of a tensor from outside: versions where both runs save it; none where it has taken the place
  // of the forward's.
  struct Change {
    size_t position;
    Metadata metadata;
    std::optional<std::pair<uint32_t, uint32_t>> versions;
  };

  Region& region_;
  BackwardKey key_;
  size_t needed_;  // number of positions up to the last one with a holder
  size_t count_ = 0;
  const bool forward_finished_;
  bool may_stop_;
  bool stopped_ = false;
  std::vector<Difference> different_;
  std::vector<Change> changed_;
};

// Hands what the recompute's graph saves to `run`, which outlives the hooks' scope.
class RecomputePacker final : public Packer {
 public:
  explicit RecomputePacker(Recompute& run) : run_(run) {}
  std::shared_ptr<Saved> pack(at::Tensor& tensor) override;

 private:
  Recompute& run_;
};

Recompute::Recompute(Region& region, const BackwardKey& key)
    : region_(region), key_(key), forward_finished_(region.forward_finished_) {
  const std::lock_guard<Lock> lock(region.state_mutex_);
  may_stop_ = region.stop_at_last_save_;
  if (!forward_finished_) {
    // A backward inside the function asks: the recompute must not run further than the forward has
    // come, whatever the options are. The node that asks is, in practice, the one that saved last.
    const NodePtr asking = torch::autograd::get_current_node();
    may_stop_ = asking && !fills_after_saving(*asking);
  }
  needed_ = region.slots_.size();
  while (needed_ > 0 && region.slots_[needed_ - 1].holders == 0) --needed_;
  const size_t count = region.slots_.size();
  region.values_.push_back({key, std::vector<at::Tensor>(count), std::vector<uint32_t>(count)});
}

bool Recompute::save(const at::Tensor& tensor) {
  if (stopped_) return true;  // the function caught the exception that stops it
  const size_t index = count_++;
  at::Tensor freed;
  const std::lock_guard<Lock> lock(region_.state_mutex_);
  const auto values = region_.find(key_);
  if (index >= values->tensors.size()) {
    stopped_ = !forward_finished_;
    return !stopped_;
  }
  if (may_stop_ && index == needed_) {
    // Nothing that is saved from here on is needed, and the last operation that is needed has run.
    // Stopping before an operation has run is allowed only at the forward's very last save.
    stopped_ = true;
    return false;
  }
  const Slot& slot = region_.slots_[index];
  if (region_.options_.check_determinism) {
    if (!slot.metadata.fits(tensor)) {
      different_.push_back({index, slot.metadata, Metadata::of(tensor)});
    }
    const auto version = static_cast<uint32_t>(tensor._version());
    if (slot.is_storage_of(tensor)) {
      if (version != slot.version) {
        changed_.push_back({index, slot.metadata, std::pair(slot.version, version)});
      }
    } else if (slot.storage.use_count() > 0 && region_.outside_.has(tensor)) {
      changed_.push_back({index, slot.metadata, std::nullopt});
    }
  }
  if (slot.holders > 0) {
    freed = std::exchange(values->tensors[index], tensor);
    values->versions[index] = version_of(tensor);
  }
  stopped_ = may_stop_ && index + 1 == values->tensors.size();
  return !stopped_;
}

void Recompute::check(const std::vector<Read>& reads) const {
  const size_t saved = region_.slots_.size();
  if (changed_.empty() && reads.empty() && different_.empty() && (stopped_ || count_ == saved)) {
    return;
  }
  py::list changes, differences;
  for (const auto& [position, metadata, versions] : changed_) {
    changes.append(py::make_tuple(position, metadata.as_tuple(), versions));
  }
  for (const auto& [position, in_forward, in_recompute] : different_) {
    differences.append(py::make_tuple(position, in_forward.as_tuple(), in_recompute.as_tuple()));
  }
  const py::object error =
      registered("checkpoint_rules")
          .attr("difference")(changes, as_list(reads), differences, saved, count_, stopped_,
                              forward_finished_, region_.options_.early_stop, region_.on_error_);
  if (!error.is_none()) throw_exception(error);
}

std::shared_ptr<Saved> RecomputePacker::pack(at::Tensor& tensor) {
  // Never with a graph: the value would keep the recompute's graph alive.
  if (tensor.requires_grad()) tensor = detached(tensor);
  if (!run_.save(tensor)) throw_stop();
  return nullptr;
}

void Region::recompute(const BackwardKey& key) {
  const py::gil_scoped_acquire gil;
  // Already here: what hooks around the region give back is made on the stream that reads it.
  const StreamScope on_its_stream(surroundings_.stream);
  const py::tuple arguments = unpack_arguments();
  forget(key);
  Recompute run(*this, key);
  const bool check = options_.check_determinism && pending_;
  PyObject* result;
  std::vector<Read> reads;
  OwnGenerators others;
  {
    auto changed = check ? outside_.find_changed(roots()) : OutsideTensors::Changes();
    if (surroundings_.rng) others = surroundings_.rng->others(changed.generators);
    ReadObserver observer(std::move(changed.tensors), check ? &*pending_ : nullptr);
    const RecomputeGuard guard(surroundings_);
    const HookGuard hooks(std::make_shared<RecomputePacker>(run));
    const ForwardRecordScope scope(forward_record_, ForwardRecordScope::kReplaying);
    result = PyObject_Call(recompute_function_.ptr(), arguments.ptr(),
                           kwargs_.is_none() ? nullptr : kwargs_.ptr());
    reads = observer.reads();
  }
  if (result == nullptr) {
    if (!run.stopped() || !PyErr_ExceptionMatches(stop_exception())) throw py::error_already_set();
    PyErr_Clear();
  }
  Py_XDECREF(result);
  run.check(reads);
  if (others.any_has_drawn()) throw_error("other_generator", on_error_);
  if (key.kind != BackwardKey::kGraphTask) return;
  // What this backward does not ask for is of no use to a later one.
  torch::autograd::Engine::get_default_engine().queue_callback([of = weak_from_this(), key] {
    if (const auto region = of.lock()) region->forget(key);
  });
}

// Keeps one position of a region alive.
class RegionSaved final : public Saved {
 public:
  RegionSaved(std::shared_ptr<Region> region, size_t index)
      : region_(std::move(region)), index_(index) {
    region_->hold(index_);
  }
  ~RegionSaved() override { region_->let_go(index_); }

  at::Tensor open() override { return region_->open(index_); }

 private:
  const std::shared_ptr<Region> region_;
  const size_t index_;
};

std::shared_ptr<Saved> RegionPacker::pack(at::Tensor& tensor) {
  return std::make_shared<RegionSaved>(region_, region_->save(tensor));
}

py::object checkpoint_region(py::object function, py::object recompute_function,
                             py::tuple arguments, py::object kwargs, bool preserve_rng_state,
                             bool early_stop, bool check_determinism, py::object on_error) {
  HANDLE_TH_ERRORS
  const auto call = [&] {
    PyObject* result =
        PyObject_Call(function.ptr(), arguments.ptr(), kwargs.is_none() ? nullptr : kwargs.ptr());
    if (result == nullptr) throw py::error_already_set();
    return py::reinterpret_steal<py::object>(result);
  };
  if (!at::GradMode::is_enabled()) return call();

  const auto region =
      std::make_shared<Region>(std::move(recompute_function), kwargs, std::move(on_error),
                               RegionOptions{preserve_rng_state, early_stop, check_determinism});
  // Before the hooks: arguments belong to what surrounds the region.
  region->save_arguments(arguments.ptr());
  region->save_surroundings();
  region->note_outside();
  py::object result;
  {
    const AutocastGuard uncached(AutocastState::capture().without_cache());
    const HookGuard hooks(std::make_shared<RegionPacker>(region));
    const RegionScope inside;
    const ForwardRecordScope scope(region->forward_record(), ForwardRecordScope::kRecording);
    result = call();
  }
  region->finish_forward(result.ptr());
  return result;
  END_HANDLE_TH_ERRORS_PYBIND
}

}  // namespace memsave_ext::checkpoint
