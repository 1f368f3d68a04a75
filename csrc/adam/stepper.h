// Steps an optimizer's parameters: in backward, as their gradients arrive, or all together.
//
// Backwards of several threads share parameters. Locks are taken in this order, never in reverse:
// first the mutex, then torch's locks of gradients or the GIL. So nobody waits for the mutex while
// holding the GIL. The GIL is taken while holding the mutex by operators that are Python themselves
// (of fake tensors, or inside a dispatch mode), and to raise an error.
#pragma once

#include <ATen/core/Tensor.h>
#include <pybind11/pybind11.h>

#include <atomic>
#include <memory>
#include <mutex>
#include <vector>

#include "adam/backward.h"
#include "adam/open_step.h"
#include "adam/parameter.h"
#include "adam/snapshot.h"

namespace memsave_ext::adam {

class Stepper : public std::enable_shared_from_this<Stepper> {
 public:
  // Keeps a weak reference to the optimizer. Gradients of fewer than `small_bytes` wait in buckets
  // until there are `bucket_bytes` of them, or backward ends. `own_step`: the optimizer is not this
  // package's, and steps by its own step().
  Stepper(const pybind11::object& optimizer, int64_t small_bytes, int64_t bucket_bytes,
          bool own_step);
  ~Stepper();

  // Called from Python.
  void attach(const pybind11::list& params);  // no other living optimizer may own them
  void detach();
  pybind11::list lost() const;  // parameters that should have this stepper's hook and do not
  // Returns the optimizer that steps a parameter in backward, or None. Removes the hook of an
  // optimizer that is gone.
  static pybind11::object owner(const pybind11::object& param);
  // Steps the parameters that have a gradient, in .grad or folded, and ends the step, so that every
  // parameter can be stepped again. Returns how many have been stepped since the last call.
  // max_norm: all gradients together are clipped to it; 0: not. unscaled: the gradients are not
  // multiples of the loss scale any more.
  int64_t step(double max_norm, bool unscaled);
  void zero_grad(bool to_none);  // also forgets a failure
  // The states of a checkpoint are loaded between these two. The first throws while a backward
  // runs, which would step with the old ones; the second forgets all that the open step has come
  // to, gradients in .grad included.
  void begin_loading();
  void end_loading();
  void accumulate(bool enabled, bool fold);
  // While enabled, nothing is stepped or folded; gradients are kept in .grad, or dropped.
  void pause(bool enabled, bool keep);
  // Sets whether each backward asks the optimizer's _on_gradients() what to do with its gradients.
  void ask(bool enabled) { asks_ = enabled; }
  // Between these two, gradients of backwards are measured and dropped. The step that follows is
  // clipped by their norm; where `max_norm` is None the norm is forgotten.
  void begin_norm_pass();
  void end_norm_pass(const pybind11::object& max_norm);
  // Returns how many parameters have folded gradients that are not stepped yet.
  int64_t folded();
  // As Records::drop_stale_low_part(), before parameters or states are read.
  void drop_stale_low_part(const at::Tensor& param, const at::Tensor& low_part);
  pybind11::object grad_norm();  // of the last step whose norm was measured, or None
  // Returns the found_inf of each device in the last step with a loss scale: 1 where a gradient was
  // not finite.
  pybind11::list found_inf() const;
  // Returns how many of these parameters were stepped, or folded into, since the last step(). Those
  // do not count whose gradient still waits in .grad.
  int64_t count_used(const pybind11::list& params);

  // Called by hooks, without the GIL, when the gradient of a parameter is complete. local_grad: the
  // local part of a DTensor's gradient. may_step: false where later hooks must still see the
  // gradient, which waits then.
  void ready(Entry& entry, const at::Tensor& param, bool may_step,
             const at::Tensor& local_grad = {});

  // The rest is for backwards and ddp.cpp.
  // Guards what the next two return, the entries, and the streams of stream_beside().
  std::mutex& mutex() { return mutex_; }
  OpenStep& open_step() { return open_step_; }
  Backwards& backwards() { return backwards_; }
  const OpenBlocks& blocks() const { return blocks_; }
  int64_t small_bytes() const { return small_bytes_; }
  int64_t bucket_bytes() const { return bucket_bytes_; }
  // Returns a stream for steps that would hold up other work on `stream`; each device has one.
  c10::Stream stream_beside(const c10::Stream& stream);
  // Makes the current streams wait for the work that those streams were given.
  void wait_for_streams_beside() const;
  // Returns the action of a backward that begins. Call without the mutex and the GIL.
  GradientAction next_action();
  // Returns null when the optimizer is gone. Call without the mutex.
  std::shared_ptr<Snapshot> take_snapshot() const;
  // Both need the GIL.
  pybind11::object optimizer() const;                                    // None when it is gone
  std::shared_ptr<Entry> entry_of(const pybind11::handle& param) const;  // null without a hook

 private:
  using Batches = ByDevice<std::vector<Parameter*>>;

  template <typename Body>
  void for_parameters(const Body& body) const;
  // Returns one DTensor of each sharding among the parameters. Needs the GIL.
  std::vector<at::Tensor> sharded() const;
  bool any_gradient() const;    // whether any .grad is set. Needs the GIL
  void drop_gradients() const;  // in .grad. Needs the GIL
  std::shared_ptr<Snapshot> read_for_step(bool unscaled) const;  // with gradients. Needs the GIL
  std::vector<Parameter*> with_gradients(Snapshot& snapshot) const;  // in .grad or folded
  Batches prepare(const std::vector<Parameter*>& remaining) const;
  void count_block(Block block, bool opens);

  pybind11::object optimizer_;  // a weak reference
  const int64_t small_bytes_, bucket_bytes_;
  const Algorithm algorithm_;
  OpenBlocks blocks_;
  std::atomic<bool> asks_{false};
  std::atomic<bool> attached_{false};  // whether hooks are installed

  std::mutex mutex_;
  OpenStep open_step_{optimizer_};
  Backwards backwards_;
  ByDevice<c10::Stream> streams_beside_;
};

}  // namespace memsave_ext::adam
