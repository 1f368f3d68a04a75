// Collects the gradients of an optimizer's parameters, from hooks in backward or from .grad, and
// carries out what the optimizer's stepper decides about them (memsave_ext/adam/stepper.py): what a
// backward does with its gradients, how they are scaled, whether one can be used now.
//
// Backwards of several threads share parameters. Locks are taken in this order, never in reverse:
// first the mutex, then torch's locks of gradients or the GIL. So nobody waits for the mutex while
// holding the GIL. The stepper is asked with the mutex and the GIL held; so are states made, and
// operators called that are Python themselves (of fake tensors, or inside a dispatch mode).
#pragma once

#include <ATen/core/Tensor.h>
#include <pybind11/pybind11.h>

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "adam/backward.h"
#include "adam/batch.h"
#include "adam/names.h"
#include "adam/parameter.h"
#include "adam/records.h"
#include "adam/snapshot.h"
#include "locks.h"

namespace memsave_ext::adam {

// What hooks do with complete gradients. The first two leave the gradient in .grad, those of
// DistributedDataParallel too in the first; kDrop frees it.
enum class Intake { kKeep, kSum, kDrop, kStep };
inline constexpr const char* kIntakes[] = {"keep", "sum", "drop", "step"};

// What the stepper need not be asked about: `Expected` in memsave_ext/adam/state_machine.py.
struct Expected {
  bool uses = true, keeps = true, measured = false, first = true;
};

// Whether a DDP reducer reduces the gradient that this node accumulates. Does not call Python.
bool is_reduced_by_ddp(const NodePtr& accumulator);

class Collector : public std::enable_shared_from_this<Collector> {
 public:
  // Keeps a weak reference to the stepper. Gradients of fewer than `small_bytes` wait in buckets
  // until there are `bucket_bytes` of them, or backward ends. `own_step`: the optimizer is not this
  // package's, and steps by its own step().
  Collector(const pybind11::object& stepper, int64_t small_bytes, int64_t bucket_bytes,
            bool own_step);
  ~Collector();

  // Called from Python.
  void attach(const pybind11::list& params);  // no other living optimizer may own them
  void detach();
  void release(const pybind11::list& params) const;  // removes the hooks of these alone
  pybind11::list lost() const;  // parameters that should have this collector's hook and do not
  // Returns the optimizer that steps a parameter in backward, or None. Removes the hook of an
  // optimizer that is gone.
  static pybind11::object owner(const pybind11::object& param);
  // The mutex, for several calls that belong together. Releases the GIL while it waits.
  void lock();
  void unlock() { mutex_.unlock(); }
  void set_intake(const std::string& name) {
    intake_ = named<Intake>(kIntakes, name, "there is no intake");
  }
  void expect(bool uses, bool keeps, bool measured, bool first) {
    expected_ = {uses, keeps, measured, first};
  }
  bool any_gradient() const;  // whether any .grad is set
  void drop_gradients() const;
  void forget_gradients();          // also of those that DDP has not begun to reduce
  pybind11::list dtensors() const;  // parameters that are DTensors
  // Returns the parameters that have gradients in .grad, readied for a step: a Batch for each
  // device. `asks`: as of Backward.
  pybind11::list remaining(const std::string& asks);
  // Drops the gradients of those parameters, where hooks are attached.
  void drop_used(const pybind11::list& batches) const;
  // Begins the next step. Returns how many parameters have been stepped in backward in this one.
  int64_t next_step();
  // As Records::drop_stale_low_part(), before parameters or states are read.
  void drop_stale_low_part(const at::Tensor& param, const at::Tensor& low_part);
  // Returns how many of these parameters were stepped in this step. Those do not count whose
  // gradient still waits in .grad.
  int64_t count_used(const pybind11::list& params);
  bool runs_backward();
  // Returns the backward of this thread, which may begin with this call; null outside of one.
  std::shared_ptr<Backward> current_backward();
  // Called before DDP reduces these gradients. Throws where they cannot be used then.
  void check_reduced(const pybind11::list& params);
  // Notes, for each of these parameters that has a hook, whether DDP reduces its gradient.
  void hand_to_ddp(const pybind11::list& params, bool enabled) const;

  // Called by hooks, without the GIL, when the gradient of a parameter is complete. may_step: false
  // where later hooks must still see the gradient, which waits then. local_gradient: returns the
  // local part of a DTensor's gradient, which may take a collective; it is called only where the
  // gradient is used.
  void ready(Entry& entry, const at::Tensor& param, bool may_step,
             const std::function<at::Tensor()>& local_gradient = nullptr);

  // The rest is for backwards, batches and rows.cpp.
  // Guards all that follows, the entries and the streams. Garbage that Python collects with it held
  // may need it as well.
  RecursiveLock& mutex() { return mutex_; }
  Backwards& backwards() { return backwards_; }
  Intake intake() const { return intake_; }
  int64_t small_bytes() const { return small_bytes_; }
  int64_t bucket_bytes() const { return bucket_bytes_; }
  Records& records() { return records_; }
  const Expected& expected() const { return expected_; }
  // Number of the step that is open.
  uint64_t step_number() const { return number_; }
  bool is_stepped(const Entry& entry) const { return entry.step == number_; }
  // Counts parameters that have been stepped in backward. Returns whether the stepper is to know.
  bool count_stepped(int64_t parameters) {
    stepped_ += parameters;
    return expected_.first;
  }
  // Readies a parameter for a step with this gradient, or a measurement. Throws, and changes
  // nothing, where the step cannot be made.
  void prepare(Parameter& parameter, at::Tensor grad, GradientAction action) const;
  // Steps prepared parameters. The caller does not hold the GIL.
  void step(c10::ArrayRef<Parameter*> parameters, const Scaling& scaling);
  // Returns a stream for steps that would hold up other work on `stream`; each device has one.
  c10::Stream stream_beside(const c10::Stream& stream);
  // Makes the current streams wait for the work that those streams were given.
  void wait_for_streams_beside() const;
  // Returns null when the optimizer is gone. Call without the mutex.
  std::shared_ptr<Snapshot> take_snapshot() const;
  // All need the GIL.
  pybind11::object stepper() const { return stepper_(); }                // None when it is gone
  pybind11::object optimizer() const;                                    // None when it is gone
  std::shared_ptr<Entry> entry_of(const pybind11::handle& param) const;  // null without a hook

 private:
  template <typename Body>
  void for_parameters(const Body& body) const;

  pybind11::object stepper_;  // a weak reference
  const int64_t small_bytes_, bucket_bytes_;
  const bool own_step_;
  std::atomic<Intake> intake_{Intake::kStep};  // hooks read it without the mutex
  std::atomic<bool> attached_{false};          // whether hooks are installed

  RecursiveLock mutex_{LockOrder::kCollector};
  Expected expected_;
  uint64_t number_ = 1;
  int64_t stepped_ = 0;
  Records records_;
  Backwards backwards_;
  ByDevice<c10::Stream> streams_beside_;
};

}  // namespace memsave_ext::adam
