// A checkpointed region of the non-reentrant kind: its forward keeps its graph, but every tensor
// that the graph saves is replaced by a holder, and computed again when the first holder is opened.
#pragma once

#include <ATen/core/Tensor.h>
#include <pybind11/pybind11.h>
#include <torch/csrc/autograd/saved_variable.h>

#include <atomic>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <vector>

#include "checkpoint/forward_record.h"
#include "checkpoint/hooks.h"
#include "checkpoint/outside.h"
#include "checkpoint/surroundings.h"
#include "checkpoint/tensors.h"
#include "locks.h"

namespace memsave_ext::checkpoint {

// What the forward saved at one position.
struct Slot {
  uint32_t holders;  // 0 once autograd has dropped it
  Metadata metadata;
  WeakStorage storage;
  uint32_t version;

  static Slot of(const at::Tensor& tensor);
  // A recompute that saves the same storage saves a tensor from outside, which must not have
  // changed in between.
  bool is_storage_of(const at::Tensor& tensor) const;
};

// A positional argument: tensors are kept as autograd keeps them, so that hooks of enclosing
// regions and of save_on_cpu see them, and a change in place is noticed. Autograd does not look at
// versions where there are hooks; they may hand the tensor itself on.
struct RegionArgument {
  torch::autograd::SavedVariable tensor;
  WeakStorage storage;
  uint32_t version;
  bool requires_grad;
  pybind11::object other;  // set when the argument is not a tensor

  static RegionArgument of(PyObject* argument);
  at::Tensor unpack() const;  // needs a gradient as in the forward; releases the GIL meanwhile
  // The versions in the forward and now, where it was changed in place; `now` is what unpack()
  // gave.
  std::optional<std::pair<uint32_t, uint32_t>> change(const at::Tensor& now) const;
};

// How a region is run; the same for every recompute.
struct RegionOptions {
  bool preserve_rng_state = true;
  bool early_stop = true;
  bool check_determinism = true;
};

// Which backward a recompute is for.
struct BackwardKey {
  enum Kind { kGraphTask, kGroup, kNone } kind;
  int64_t id;
  bool operator==(const BackwardKey& other) const { return kind == other.kind && id == other.id; }

  static BackwardKey current();
};

// All state of a region. May be used and freed without the GIL.
class Region : public std::enable_shared_from_this<Region> {
 public:
  Region(pybind11::object recompute_function, pybind11::object kwargs, pybind11::object on_error,
         RegionOptions options);
  ~Region();

  // Before the forward, and before its hooks are pushed. `arguments` is a tuple.
  void save_arguments(PyObject* arguments);
  void save_surroundings();
  // Also before the forward: notes the tensors that the function may read beside its positional
  // arguments.
  void note_outside();
  // After the forward: settles whether random state must be kept and where a recompute may stop.
  void finish_forward(PyObject* outputs);

  // Notes that the forward saves `tensor`; returns its position.
  size_t save(const at::Tensor& tensor);
  // The value of what the forward saved at `index`. Computes the region again where this backward
  // has not done so yet.
  at::Tensor open(size_t index);

  ForwardRecord& forward_record() { return forward_record_; }

 private:
  friend class Recompute;
  friend class RegionSaved;

  struct Values {  // of one backward
    BackwardKey key;
    std::vector<at::Tensor> tensors;
    std::vector<uint32_t> versions;  // when they were saved
    // Once the recompute has ended and was checked. Until then another thread waits.
    bool is_complete = false;
  };

  pybind11::tuple unpack_arguments() const;
  std::vector<PyObject*> roots() const;  // borrowed; from which outside tensors are reached
  void hold(size_t index);
  void let_go(size_t index);
  at::Tensor take(const BackwardKey& key, size_t index);
  void recompute(const BackwardKey& key);
  void complete(const BackwardKey& key);
  void forget(const BackwardKey& key);
  std::vector<Values>::iterator find(const BackwardKey& key);  // with state_mutex_ held

  pybind11::object recompute_function_;
  pybind11::object kwargs_;  // a dict, or none
  pybind11::object on_error_;
  RegionOptions options_;
  std::vector<RegionArgument> arguments_;
  CudaDevices devices_;  // of tensors among them, and after the forward of all that are known
  Surroundings surroundings_;
  OutsideTensors outside_;
  std::optional<Pending> pending_;  // set when a forward that saved anything has ended
  ForwardRecord forward_record_;
  // Guards slots_ and values_. While it is held nothing is called and no tensor is freed.
  Lock state_mutex_{LockOrder::kRegionState};
  std::vector<Slot> slots_;
  std::vector<Values> values_;
  bool forward_finished_ = false;
  bool stop_at_last_save_;
  uint64_t last_save_sequence_nr_ = 0;
  c10::VariableVersion last_save_version_{c10::VariableVersion::DISABLED};
  int64_t last_save_numel_ = 0;
  Lock recompute_mutex_{
      LockOrder::kRegionRecompute};  // never waited for with the GIL, which a recompute needs
  std::atomic<std::thread::id> recomputing_thread_{};
};

// Hands what a forward saves to its region.
class RegionPacker final : public Packer {
 public:
  explicit RegionPacker(std::shared_ptr<Region> region) : region_(std::move(region)) {}
  std::shared_ptr<Saved> pack(at::Tensor& tensor) override;

 private:
  const std::shared_ptr<Region> region_;
};

// Runs `function(*arguments, **kwargs)`, kwargs a dict or None, as a region that recomputes with
// `recompute_function`. `on_error` is None, or adds to the message of a CheckpointError.
pybind11::object checkpoint_region(pybind11::object function, pybind11::object recompute_function,
                                   pybind11::tuple arguments, pybind11::object kwargs,
                                   bool preserve_rng_state, bool early_stop, bool check_determinism,
                                   pybind11::object on_error);

}  // namespace memsave_ext::checkpoint
