// One backward in which parameters are stepped. finish() ends it; where the backward raised, it is
// destroyed without finish().
#pragma once

#include <c10/core/SafePyObject.h>
#include <c10/core/Stream.h>
#include <pybind11/pybind11.h>
#include <torch/csrc/autograd/variable.h>

#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "adam/batch.h"
#include "adam/parameter.h"
#include "adam/rows.h"
#include "adam/snapshot.h"
#include "compat.h"
#include "streams.h"

namespace memsave_ext::adam {

// The lock that torch holds while it accumulates into a parameter's gradient. Post-accumulate hooks
// run after that, without it.
class GradLock {
 public:
  // Locks the gradient of the parameter whose torch::autograd::impl::grad_accumulator() this is.
  // Where that is null, as the parameter requires no gradient, nothing is locked.
  explicit GradLock(NodePtr accumulator) : accumulator_(std::move(accumulator)) {
    if (accumulator_) lock_ = std::unique_lock((*accumulator_).*OfNode::mutex());
  }

 private:
  struct OfNode : torch::autograd::Node {
    static auto mutex() -> std::mutex torch::autograd::Node::* { return &OfNode::mutex_; }
  };

  NodePtr accumulator_;
  std::unique_lock<std::mutex> lock_;
};

class Collector;

// What is done with the gradients of one backward; kKeep leaves them in .grad, where they add up.
enum class GradientAction { kStep, kMeasure, kKeep };
inline constexpr const char* kActions[] = {"step", "measure", "keep"};

class Backward {
 public:
  // `begun`: what the stepper's begin_backward() has returned. Needs the GIL.
  Backward(std::shared_ptr<Collector> collector, std::shared_ptr<Snapshot> snapshot,
           const pybind11::tuple& begun);
  ~Backward();

  GradientAction action() const { return action_; }
  const char* action_name() const { return kActions[static_cast<int>(action_)]; }
  // Calls a method of the optimizer's stepper. Takes the GIL; the caller may hold the collector's
  // mutex.
  template <typename... Args>
  void ask_stepper(const char* method, Args&&... args) const {
    const pybind11::gil_scoped_acquire gil;
    stepper().attr(method)(std::forward<Args>(args)...);
  }
  // The caller of the next four holds the collector's mutex.
  // Whether the parameter was in param_groups when the snapshot was taken.
  bool has(const Entry& entry) const { return entry.snapshot == snapshot_->number; }
  // Applies the action to the parameter's gradient now, or queues it; with `may_flush` false it is
  // queued unless finish() has run. `local_grad` is this process's part of a DTensor's gradient;
  // undefined for other parameters.
  void add(Entry& entry, const NodePtr& accumulator, const at::Tensor& local_grad, bool may_flush);
  // Begins a step of the parameter, rows by rows, or returns why its gradient has to be whole.
  std::variant<std::string, std::unique_ptr<StepInRows>> step_in_rows(const Entry& entry,
                                                                      const NodePtr& accumulator);
  // Drops the parameter from the queue, if it is there, so that it is not stepped: its gradient is
  // part of a sum by now, for example.
  void forget_waiting(Entry& entry);

  // Applies the action to `grads`, which DDP has reduced over processes; queues those of parameters
  // that a recompute still needs unchanged. Called from Python.
  void step_reduced(const pybind11::list& params, const pybind11::list& grads);
  // Applies the action to all queued gradients, and publishes new states to Python. The caller
  // holds neither the mutex nor the GIL.
  void finish();

 private:
  struct Waiting {
    Parameter* parameter;
    NodePtr accumulator;          // the parameter's
    at::Tensor grad, local_grad;  // when it was queued; local_grad is undefined but for DTensors
    int64_t bytes = 0;
    bool is_reduced = false;  // by DDP: `grad` is a copy, and .grad has none
  };
  // What a bucket's gradients are of. Where stepping shards takes collectives, all processes must
  // flush the same ones together: these wait by themselves, and only what all processes know
  // decides how long.
  enum class Kind { kPlain, kShards, kShardsThatAsk };
  struct Bucket {  // gradients that wait, all made on one stream
    Kind kind;
    std::optional<c10::Stream> stream;
    c10::Device device;
    std::deque<Waiting> waiting;
    int64_t bytes = 0;
  };

  Parameter& parameter_of(const Entry& entry) { return snapshot_->parameters[entry.position]; }
  Bucket& bucket_of(const at::Tensor& param, Kind kind);
  // Returns the size of a gradient, for DTensors of its largest shard.
  static int64_t bytes_of(const Parameter& parameter, const at::Tensor& grad, Kind kind);
  // Applies the action to the bucket's gradients. Without `all`, those stay queued whose parameters
  // a recompute still needs unchanged.
  void flush(Bucket& bucket, bool all);
  bool is_awaited(const Parameter& parameter) const;
  void check_use(const Entry& entry) const;
  void note_use(Entry& entry) const;
  // Returns how gradients on this device, used on its current stream, are scaled.
  const Scaling& scaling(c10::Device device);
  pybind11::object stepper() const;  // needs the GIL
  void add_reduced(Parameter& parameter, const at::Tensor& grad);
  bool prepare(const Waiting& waiting);
  void apply(c10::ArrayRef<Parameter*> parameters);
  void count_stepped(int64_t parameters);
  // Returns why the prepared parameter cannot be stepped in rows.
  std::optional<std::string> obstacle_to_rows(const Parameter& parameter) const;
  void apply_beside(c10::ArrayRef<Parameter*> parameters,
                    const std::optional<c10::Stream>& made_on);
  void publish();
  void fail();
  void tell_failure() const;
  void end();

  struct OnStream {
    c10::Device device;
    std::optional<c10::Stream> stream;
    Scaling scaling;
  };

  std::shared_ptr<Collector> collector_;
  std::shared_ptr<Snapshot> snapshot_;
  // Neither is to go meanwhile: what is left could not be stepped.
  c10::SafePyObject optimizer_, stepper_;
  const GradientAction action_;
  const Asks asks_;
  std::vector<OnStream> scalings_;
  std::vector<Bucket> buckets_;
  int64_t stepped_ = 0;  // number of parameters that were stepped
  bool finished_ = false, ended_ = false;
};

// The running backwards that reach an optimizer's parameters. The caller holds the collector's
// mutex, except for begin().
class Backwards {
 public:
  // Returns the backward of the graph task that this thread works for; null where there is none.
  std::shared_ptr<Backward> current() const;
  // Returns current(), and begins one where there is none. Returns null outside of a backward, as
  // step() will apply those gradients, and when the optimizer is gone. The caller holds neither
  // the mutex nor the GIL.
  std::shared_ptr<Backward> begin(Collector& collector);
  // Notes that a backward has ended, finished or not.
  void end_one();
  bool any() const { return running_ > 0; }
  // Makes this the shared snapshot, and notes in each entry its parameter's position there.
  void use_snapshot(const std::shared_ptr<Snapshot>& snapshot);

 private:
  // Null where no backward runs: step() has one, too, which an error's traceback may keep alive.
  std::shared_ptr<Snapshot> shared() const { return any() ? snapshot_.lock() : nullptr; }

  // By id of the graph task.
  std::vector<std::pair<int64_t, std::weak_ptr<Backward>>> by_task_;
  int64_t running_ = 0;
  uint64_t ended_ = 0;                // number of backwards that have ever ended
  std::weak_ptr<Snapshot> snapshot_;  // that the running backwards share
  uint64_t snapshots_ = 0;            // number of snapshots ever used
};

}  // namespace memsave_ext::adam
