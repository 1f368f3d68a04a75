// Steps an optimizer's parameters: in backward, as their gradients arrive, or all together.
//
// Backwards of several threads share parameters. The mutex is never awaited with the GIL held. The
// GIL is awaited with it held by operators that are Python themselves, of fake tensors or inside of
// a dispatch mode, and to raise an error. With it, torch's locks of gradients are awaited, never
// the other way round.
#pragma once

#include <ATen/core/Tensor.h>
#include <pybind11/pybind11.h>

#include <atomic>
#include <memory>
#include <mutex>
#include <vector>

#include "adam/backwards.h"
#include "adam/entry.h"
#include "adam/open_step.h"
#include "adam/snapshot.h"
#include "adam/state_machine.h"

namespace memsave_ext::adam {

class Stepper : public std::enable_shared_from_this<Stepper> {
 public:
  // Keeps a weak reference to the optimizer. Gradients of fewer than `small_bytes` wait until
  // there are `bucket_bytes` of them, or backward ends.
  Stepper(pybind11::object optimizer, int64_t small_bytes, int64_t bucket_bytes);
  ~Stepper();

  // Called from Python.
  void attach(const pybind11::list& params);  // which no other living optimizer owns
  void detach();
  pybind11::list lost() const;  // parameters whose hook something else has displaced
  // The optimizer that steps a parameter in backward, or None. The hook of one that is gone is
  // removed.
  static pybind11::object owner(const pybind11::object& param);
  // Steps what has a gradient, and lets every parameter be stepped again. Returns how many have
  // been stepped since the last call.
  // With `max_norm`, all gradients together are clipped to it; `unscaled`: they are not multiples
  // of the loss scale any more.
  int64_t step(double max_norm, bool unscaled);
  void zero_grad(bool to_none);  // a failure is acknowledged
  void accumulate(bool enabled, bool fold);
  // Nothing is stepped or folded; gradients are kept in .grad, or dropped.
  void pause(bool enabled, bool keep);
  // Whether each backward asks the optimizer what becomes of its gradients: its _on_gradients().
  void ask(bool enabled) { asks_ = enabled; }
  // Gradients of the backwards between are measured and dropped. What is measured clips the step
  // that follows; where `max_norm` is None it is forgotten.
  void begin_norm_pass();
  void end_norm_pass(const pybind11::object& max_norm);
  // How many parameters have gradients in their moments that are not stepped yet.
  int64_t folded();
  pybind11::object grad_norm();  // of the last step whose norm was measured, or None
  // Of the last step with a loss scale: for each device, 1 where a gradient was not finite.
  pybind11::list found() const;
  // How many of these parameters had a gradient that was stepped with, or folded, since step().
  int64_t count_used(const pybind11::list& params);

  // Called by hooks, without the GIL: the gradient of a parameter is complete. `local_grad` is the
  // part of a DTensor's that is here. With `may_step` false others are still to see it.
  void ready(Entry& entry, const at::Tensor& param, bool may_step,
             const at::Tensor& local_grad = {});

  // For backwards and ddp.cpp.
  // Of what the next two return, of entries and of streams beside.
  std::mutex& mutex() { return mutex_; }
  OpenStep& open_step() { return open_step_; }
  Backwards& backwards() { return backwards_; }
  const OpenBlocks& blocks() const { return blocks_; }
  int64_t small_bytes() const { return small_bytes_; }
  int64_t bucket_bytes() const { return bucket_bytes_; }
  // A stream for steps that would hold up what else this one is given; one for each device.
  c10::Stream stream_beside(const c10::Stream& stream);
  // The current streams go on when what those were given is done.
  void wait_for_streams_beside() const;
  Task next_task();  // of a backward that begins. Without the mutex and the GIL
  // Null when the optimizer is gone. Without the mutex.
  std::shared_ptr<Snapshot> take_snapshot() const;
  // Both need the GIL.
  pybind11::object optimizer() const;                                    // none when it is gone
  std::shared_ptr<Entry> entry_of(const pybind11::handle& param) const;  // null without a hook

 private:
  using Batches = ByDevice<std::vector<Parameter*>>;

  template <typename Body>
  void for_parameters(const Body& body) const;
  bool any_gradient() const;                                         // in .grad. Needs the GIL
  std::shared_ptr<Snapshot> read_for_step(bool unscaled) const;      // gradients too. Needs the GIL
  std::vector<Parameter*> with_gradients(Snapshot& snapshot) const;  // in .grad or the moments
  Batches prepare(const std::vector<Parameter*>& remaining) const;
  void count_block(Block block, bool opens);

  pybind11::object optimizer_;  // a weak reference
  const int64_t small_bytes_, bucket_bytes_;
  OpenBlocks blocks_;
  std::atomic<bool> asks_{false};
  std::atomic<bool> attached_{false};  // that any parameter has a hook

  std::mutex mutex_;
  OpenStep open_step_;
  Backwards backwards_;
  ByDevice<c10::Stream> streams_beside_;
};

}  // namespace memsave_ext::adam
