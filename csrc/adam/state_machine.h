// The state of an optimizer's step, and what may happen next. All transitions are in one table, in
// memsave_ext/adam/state_machine.py, which has both enums in the same order.
//
// A state belongs to the step as a whole, from one call of step() to the next. What nests, or
// exists several times at once in several threads, is counted instead: the blocks of the training
// loop that say what is done with gradients (OpenBlocks), which can be open in any state, and the
// backwards that run (Backwards).
#pragma once

#include <atomic>
#include <cstdint>
#include <string>
#include <variant>
#include <vector>

namespace memsave_ext::adam {

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

void give_transitions(Transitions table);

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

}  // namespace memsave_ext::adam
