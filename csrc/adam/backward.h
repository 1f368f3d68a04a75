// One backward in which parameters are stepped. Ends in finish(), or unfinished where it raised.
#pragma once

#include <c10/core/Stream.h>

#include <memory>
#include <optional>
#include <vector>

#include "adam/open_step.h"
#include "adam/snapshot.h"

namespace memsave_ext::adam {

class Stepper;

class Backward {
 public:
  Backward(std::shared_ptr<Stepper> stepper, std::shared_ptr<Snapshot> snapshot, Task task);
  ~Backward();

  Task task() const { return task_; }
  // All of these with the stepper's mutex.
  // Whether the parameter was in param_groups when this began.
  bool has(const Entry& entry) const { return entry.snapshot == snapshot_->number; }
  // Does it to the parameter's now, or soon; with `may_flush` false, not now. `grad` is the part of
  // a DTensor's that is here; undefined for others.
  void add(Entry& entry, at::Tensor grad, bool may_flush);
  // A parameter whose gradient waits is not stepped: it is part of a sum by now, say.
  void forget_waiting(Entry& entry);

  // Without the mutex and the GIL, both of these.
  // Does it to gradients, given here, that were reduced over processes.
  void step_reduced(const std::vector<std::shared_ptr<Entry>>& entries,
                    const std::vector<at::Tensor>& grads);
  // What waits, and new states to Python.
  void finish();

 private:
  struct Waiting {
    Parameter* parameter;  // ready
    at::Tensor grad;       // as it was in .grad then
  };
  struct Bucket {  // gradients of one stream
    std::optional<c10::Stream> stream;
    c10::Device device;
    std::vector<Waiting> waiting;
    int64_t bytes = 0;
  };

  Parameter& parameter_of(const Entry& entry) { return snapshot_->parameters[entry.position]; }
  Bucket& bucket_of(const at::Tensor& param);
  // With `all` also what a recompute still needs as it is.
  void flush(Bucket& bucket, bool all);
  void apply(c10::ArrayRef<Parameter*> parameters);
  void publish();
  void fail();
  void end();

  std::shared_ptr<Stepper> stepper_;
  std::shared_ptr<Snapshot> snapshot_;
  const Task task_;
  std::vector<Bucket> buckets_;
  int64_t stepped_ = 0;  // or folded
  bool finished_ = false, ended_ = false;
};

}  // namespace memsave_ext::adam
