// Steps an optimizer's parameters: in backward, as their gradients arrive, or all together.
//
// Backwards of several threads share parameters. The mutex is never awaited with the GIL held, and
// the GIL is never awaited with it held. With it, torch's locks of gradients are awaited, never the
// other way round.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>
#include <pybind11/pybind11.h>

#include <atomic>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "adam/grad_norm.h"
#include "adam/records.h"
#include "adam/snapshot.h"

namespace memsave_ext::adam {

class Backward;
enum class Task;

// What is known of a parameter with a hook. No pointer to it: torch swaps tensors only where there
// is none.
struct Entry {
  // Where the parameter stands in the snapshot that was taken last.
  uint64_t snapshot = 0;  // its number
  size_t position = 0;
  // The step it took part in last. Its gradient may still wait in a bucket.
  uint64_t step = 0;
  uint64_t measured = 0;               // likewise, in a norm pass
  uint64_t folded = 0;                 // likewise, into its moments
  const Backward* waits_in = nullptr;  // a bucket of this one
  bool made_dict = false;              // of Python hooks, which was not there
  // DistributedDataParallel reduces its gradient and then says so, and its hook only notes that
  // there is one.
  bool reduced_by_ddp = false;
  bool has_local_gradient = false;  // since the last step
};

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
  pybind11::list found();
  // How many of these parameters had a gradient that was stepped with, or folded, since step().
  int64_t count_used(const pybind11::list& params);

  // For DistributedDataParallel's communication hook, which has the GIL.
  void hand_to_ddp(const pybind11::list& params, bool enabled);
  // Before the reduction of these parameters' gradients. What it returns goes to step_reduced().
  std::shared_ptr<Backward> begin_reduced(const pybind11::list& params);
  void step_reduced(const std::shared_ptr<Backward>& backward, const pybind11::list& params,
                    const pybind11::list& grads);

  // Called by hooks, without the GIL: the gradient of a parameter is complete. `local_grad` is the
  // part of a DTensor's that is here. With `may_step` false others are still to see it.
  void ready(Entry& entry, const at::Tensor& param, bool may_step,
             const at::Tensor& local_grad = {});

 private:
  friend class Backward;

  int64_t step_remaining(double max_norm, bool unscaled);
  void end_step();
  Scaling scaling(const Snapshot& snapshot, c10::Device device);
  template <typename Body>
  void for_parameters(const Body& body) const;
  bool any_gradient() const;           // in .grad. Needs the GIL
  pybind11::object optimizer() const;  // none when it is gone. Needs the GIL
  // Null when the optimizer is gone.
  std::shared_ptr<Snapshot> take_snapshot();
  // From now on entries say where they stand in it. With the mutex.
  void use_snapshot(const std::shared_ptr<Snapshot>& snapshot);
  std::shared_ptr<Backward> current_backward();
  Task next_task();  // of a backward that begins
  static std::string name(const Entry& entry, const at::Tensor& param);
  std::shared_ptr<Entry> own_entry(const pybind11::handle& param) const;  // null without a hook
  void check_not_failed();
  void check_none_runs();
  void check_not_stepped(const Entry& entry, const at::Tensor& param);
  void check_accumulates_after_no_norm() const;

  pybind11::object optimizer_;  // a weak reference
  const int64_t small_bytes_, bucket_bytes_;
  std::atomic<int> accumulating_{0}, folding_{0}, keeping_{0}, dropping_{0};
  std::atomic<bool> measuring_{false};
  std::atomic<bool> asks_{false};

  std::mutex mutex_;                   // for what follows, and for Entry
  std::atomic<bool> attached_{false};  // that any parameter has a hook
  std::vector<std::pair<int64_t, std::weak_ptr<Backward>>> backwards_;  // by graph task
  uint64_t ended_ = 0;                                                  // backwards
  int64_t running_ = 0;                                                 // of these
  std::weak_ptr<Snapshot> snapshot_;
  uint64_t snapshots_ = 0;
  uint64_t step_ = 1;
  int64_t stepped_ = 0;  // since step()
  Records records_;
  std::unique_ptr<GradNorm> norm_;  // of this step
  at::Tensor last_norm_;
  ByDevice<at::Tensor> found_;
  std::vector<at::Tensor> last_found_;
  int64_t stepped_before_failure_ = 0;
};

}  // namespace memsave_ext::adam
