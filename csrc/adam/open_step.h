// The step that is open: from one call of step() to the next, and what happens to it between.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/ArrayRef.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "adam/parameter.h"
#include "adam/records.h"
#include "adam/scaling.h"
#include "adam/snapshot.h"

namespace memsave_ext::adam {

// What may happen next follows from the state of the step as a whole. All transitions are in one
// table, in memsave_ext/adam/state_machine.py, which has both enums in the same order. What nests,
// or exists several times at once in several threads, is counted instead: the blocks of the
// training loop that say what is done with gradients (OpenBlocks), which can be open in any state,
// and the backwards that run (Backwards).
enum class StepState {
  kIdle,       // no parameter has been stepped since the last call of step()
  kStepping,   // some parameters have been stepped
  kMeasuring,  // inside norm_pass(): gradients are measured and dropped
  kClipping,   // after norm_pass(): steps are clipped by the norm it measured
  kFailed,     // a backward raised after it had stepped some of the parameters
};

enum class Event {
  kKeepGradients,   // gradients will add up over backwards, in .grad or folded
  kUseGradient,     // a gradient is complete: it will be stepped with, folded or measured
  kStepped,         // parameters have been stepped
  kBeginNormPass,   // norm_pass() is entered
  kPassAfterFold,   // norm_pass() is entered, with folded gradients not stepped yet
  kFinishNormPass,  // norm_pass() is left, and the norm is known
  kDropNormPass,    // norm_pass() is left by an error
  kEndStep,         // step() is called
  kFail,            // a backward raised after it had stepped or folded
  kAcknowledge,     // zero_grad() is called, which forgets a failure
  kLoad,            // states were loaded: what the step has come to does not matter any more
};

// For each event and state: the number of the next state, or why there is none.
using Transitions = std::vector<std::vector<std::variant<int64_t, std::string>>>;

void give_transitions(const Transitions& table);

// The caller holds the stepper's mutex.
class StateMachine {
 public:
  StepState state() const { return state_; }
  // Returns the state that the event leads to. Throws where it cannot happen in this state.
  StepState check(Event event) const;
  // Goes to that state. Throws, and keeps the state, where the event cannot happen.
  void handle(Event event);
  // Notes that a backward raised after it had stepped, or folded into, `stepped` parameters. Does
  // nothing for 0.
  void fail(int64_t stepped);

 private:
  StepState state_ = StepState::kIdle;
  int64_t stepped_before_failure_ = 0;
};

enum class Block {
  kAccumulate,  // accumulate(): gradients add up in .grad
  kFold,        // accumulate(fold=True): they are folded into the moments
  kKeep,        // paused(keep=True): they stay in .grad, those of DistributedDataParallel too
  kDrop,        // paused(): they are dropped
};

// Counts the open blocks of each kind. They hold for the backwards of all threads. The counts are
// atomic because hooks read them without the mutex.
class OpenBlocks {
 public:
  void count(Block block, bool opens) { open_[static_cast<int>(block)] += opens ? 1 : -1; }
  bool any(Block block) const { return open_[static_cast<int>(block)] > 0; }

 private:
  std::atomic<int> open_[4] = {};
};

// What is done with the gradients of one backward; kKeep leaves them in .grad, where they add up.
enum class GradientAction { kStep, kFold, kMeasure, kKeep };

// An optimizer always has one open step: the next begins where one ends. The caller holds the
// stepper's mutex.
class OpenStep {
 public:
  // `optimizer`: a weak reference, which must live as long.
  explicit OpenStep(const pybind11::object& optimizer) : optimizer_(optimizer) {}

  StepState state() const { return machine_.state(); }
  // Throws where the event cannot happen now.
  void check(Event event) const { machine_.check(event); }
  // Throws where the gradient of this parameter cannot be used now: it has had one in this step, or
  // its norm was not measured.
  void check_use(const Entry& entry, const at::Tensor& param) const;
  // Whether stepping the shard takes a collective of the processes that have the others.
  bool asks_others(const Parameter& parameter, const Snapshot& snapshot) const {
    return !norm_ && asks_other_shards(parameter, snapshot.grad_scale.defined());
  }
  // Notes that the parameter takes part in this step. Its gradient may still wait in a bucket.
  void note_use(Entry& entry, GradientAction action) const;
  bool is_stepped(const Entry& entry) const { return entry.step == number_; }
  bool is_used(const Entry& entry) const { return is_stepped(entry) || entry.folded == number_; }

  // Readies a parameter for apply(). Throws, and changes nothing, where the action cannot be
  // applied.
  void prepare(Parameter& parameter, at::Tensor grad, GradientAction action) const;
  // Applies the action to prepared parameters on one device, and drops their `grad`. Throws where
  // the optimizer's own step() raises, after which the step has failed.
  void apply(c10::ArrayRef<Parameter*> parameters, GradientAction action, const Snapshot& snapshot);
  // Returns why a prepared parameter cannot be stepped in rows, whose whole gradient is not known;
  // null where it can be.
  const char* obstacle_to_rows(const Parameter& parameter, const Snapshot& snapshot) const;
  // Begins that step. It counts as made.
  std::unique_ptr<StepInRows> step_in_rows(const Parameter& parameter);
  // Notes that a backward raised after it had stepped, or folded into, `stepped` parameters.
  void fail(int64_t stepped) { machine_.fail(stepped); }

  void begin_norm_pass();
  // Without `max_norm` the norm pass is dropped, as if there had been none.
  // `sharded`: as for GradNorm::finish(), also in clip().
  void end_norm_pass(std::optional<double> max_norm, const at::Tensor& grad_scale,
                     c10::ArrayRef<at::Tensor> sharded);
  // Measures the norm of all gradients of these prepared parameters; apply() then clips to it.
  void clip(const ByDevice<std::vector<Parameter*>>& parameters, double max_norm,
            const at::Tensor& grad_scale, c10::ArrayRef<at::Tensor> sharded);

  bool is_folded(const Parameter& parameter) const { return records_.is_folded(parameter.state); }
  // Returns how many parameters have folded gradients that are not stepped yet.
  int64_t folded() const { return records_.folded(); }
  void drop_stale_low_part(const at::Tensor& param, const at::Tensor& low_part) const {
    records_.drop_stale_low_part(param, low_part);
  }

  // Ends this step and returns how many parameters were stepped in it.
  int64_t end();
  // Forgets a failure, and begins the next step. Does nothing where nothing failed.
  void acknowledge();
  // Begins a step anew, in which nothing has been stepped, folded or measured. An open norm pass
  // stays open.
  void restart();

  // The norm of all gradients in the last step that measured it; undefined where none has.
  at::Tensor grad_norm() const;
  // The found_inf of each device in the last step with a loss scale: 1 where a gradient was not
  // finite.
  const std::vector<at::Tensor>& found_inf() const { return found_inf_.of_last_step(); }

 private:
  Scaling scaling(const Snapshot& snapshot, c10::Device device);
  void step(c10::ArrayRef<Parameter*> parameters, const Scaling& scaling);
  // Steps, where shards of DTensors may have to be scaled alike.
  void step_shards(c10::ArrayRef<Parameter*> parameters, const Scaling& scaling);
  void begin_next();

  const pybind11::object& optimizer_;
  StateMachine machine_;
  uint64_t number_ = 1;
  int64_t stepped_ = 0;
  Records records_;
  std::unique_ptr<GradNorm> norm_;  // of this step; null where no norm is measured
  at::Tensor last_norm_;
  FoundInf found_inf_;
};

}  // namespace memsave_ext::adam
