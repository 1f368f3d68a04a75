// One backward in which parameters are stepped. Ends in finish(), or unfinished where it raised.
#pragma once

#include <c10/core/Stream.h>

#include <memory>
#include <optional>
#include <vector>

#include "adam/snapshot.h"

namespace memsave_ext::adam {

struct Entry;
class Stepper;

// What becomes of gradients.
enum class Task { kStep, kFold, kMeasure, kAccumulate };

class Backward {
 public:
  Backward(std::shared_ptr<Stepper> stepper, std::shared_ptr<Snapshot> snapshot, Task task);
  ~Backward();

  const std::shared_ptr<Snapshot>& snapshot() const { return snapshot_; }
  Task task() const { return task_; }
  // Does it to the parameter's now, or soon; with `may_flush` false, not now. `grad` is the part of
  // a DTensor's that is here; undefined for others. With the stepper's mutex.
  void add(Entry& entry, at::Tensor grad, bool may_flush);
  // A parameter whose gradient waits is not stepped: it is part of a sum by now, say. With the
  // stepper's mutex.
  void forget_waiting(Entry& entry);
  // Without the mutex and the GIL, both of these.
  // Does it to gradients, given here, that were reduced over processes.
  void step_reduced(const std::vector<Entry*>& entries, const std::vector<at::Tensor>& grads);
  // What waits, and new states to Python.
  void finish();

 private:
  struct Waiting {
    Entry* entry;
    at::Tensor grad;  // as it is in .grad: not that of `update` where it is a DTensor
    Update update;
  };
  struct Bucket {  // gradients of one stream
    std::optional<c10::Stream> stream;
    c10::Device device;
    std::vector<Waiting> waiting;
    int64_t bytes = 0;
  };

  Update make_update(const Entry& entry, at::Tensor grad);
  Bucket& bucket_of(const at::Tensor& param);
  void flush(Bucket& bucket);
  void apply(c10::ArrayRef<Update> updates, c10::ArrayRef<Entry*> entries);
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
