// One backward in which parameters are stepped. finish() ends it; where the backward raised, it is
// destroyed without finish().
#pragma once

#include <c10/core/Stream.h>

#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <utility>
#include <variant>
#include <vector>

#include "adam/open_step.h"
#include "adam/snapshot.h"
#include "compat.h"

namespace memsave_ext::adam {

class Stepper;

class Backward {
 public:
  Backward(std::shared_ptr<Stepper> stepper, std::shared_ptr<Snapshot> snapshot,
           GradientAction action);
  ~Backward();

  GradientAction action() const { return action_; }
  // The caller of the next four holds the stepper's mutex.
  // Whether the parameter was in param_groups when the snapshot was taken.
  bool has(const Entry& entry) const { return entry.snapshot == snapshot_->number; }
  // Applies the action to the parameter's gradient now, or queues it; with `may_flush` false it is
  // queued unless finish() has run. `local_grad` is this process's part of a DTensor's gradient;
  // undefined for other parameters.
  void add(Entry& entry, const NodePtr& accumulator, const at::Tensor& local_grad, bool may_flush);
  // Begins a step of the parameter, rows by rows, or returns why its gradient has to be whole.
  std::variant<const char*, std::unique_ptr<StepInRows>> step_in_rows(const Entry& entry,
                                                                      const NodePtr& accumulator);
  // Drops the parameter from the queue, if it is there, so that it is not stepped: its gradient is
  // part of a sum by now, for example.
  void forget_waiting(Entry& entry);

  // The caller of the next two holds neither the mutex nor the GIL.
  // Applies the action to `grads`, which have been reduced over processes; queues those of
  // parameters that a recompute still needs unchanged.
  void step_reduced(const std::vector<std::shared_ptr<Entry>>& entries,
                    const std::vector<at::Tensor>& grads);
  // Applies the action to all queued gradients, and publishes new states to Python.
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
  void add_reduced(Parameter& parameter, const at::Tensor& grad);
  bool prepare(const Waiting& waiting);
  void apply(c10::ArrayRef<Parameter*> parameters);
  void apply_beside(c10::ArrayRef<Parameter*> parameters,
                    const std::optional<c10::Stream>& made_on);
  void publish();
  void fail();
  void end();

  std::shared_ptr<Stepper> stepper_;
  std::shared_ptr<Snapshot> snapshot_;
  const GradientAction action_;
  std::vector<Bucket> buckets_;
  int64_t stepped_ = 0;  // number of parameters that were stepped or folded into
  bool finished_ = false, ended_ = false;
};

// The running backwards that reach an optimizer's parameters. The caller holds the stepper's
// mutex, except for begin().
class Backwards {
 public:
  // Returns the backward of the graph task that this thread works for; null where there is none.
  std::shared_ptr<Backward> current() const;
  // Returns current(), and begins one where there is none. Returns null outside of a backward, as
  // step() will apply those gradients, and when the optimizer is gone. The caller holds neither
  // the mutex nor the GIL.
  std::shared_ptr<Backward> begin(Stepper& stepper);
  // Notes that a backward has ended, finished or not.
  void end_one();
  // Throws while any backward runs. `call`: what cannot be called then.
  void check_none(const char* call) const;
  // Makes this the shared snapshot, and notes in each entry its parameter's position there.
  void use_snapshot(const std::shared_ptr<Snapshot>& snapshot);

 private:
  // By id of the graph task.
  std::vector<std::pair<int64_t, std::weak_ptr<Backward>>> by_task_;
  int64_t running_ = 0;
  uint64_t ended_ = 0;                // number of backwards that have ever ended
  std::weak_ptr<Snapshot> snapshot_;  // that the running backwards share
  uint64_t snapshots_ = 0;            // number of snapshots ever used
};

}  // namespace memsave_ext::adam
