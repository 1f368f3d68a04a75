// What the step of an optimizer has come to, and what may happen next: all transitions are in one
// table, in state_machine.cpp.
//
// A state belongs to the step as a whole, from one call of step() to the next. What nests, or is
// there several times at once in several threads, is counted instead: the blocks of the training
// loop that say what becomes of gradients (OpenBlocks), which can be open in any state, and the
// backwards that run (Backwards).
#pragma once

#include <atomic>
#include <cstdint>

namespace memsave_ext::adam {

enum class StepState {
  kIdle,       // no parameter has been stepped since the last call of step()
  kStepping,   // some have been
  kMeasuring,  // inside of norm_pass(): gradients are measured and dropped
  kClipping,   // after it: what is stepped is clipped to its norm
  kFailed,     // a backward raised after it had stepped some parameters, and not all
};

enum class Event {
  kKeepGradients,   // they will stay in .grad, or be folded, and add up over backwards
  kUseGradient,     // one is complete, and will be stepped with, folded or measured
  kStepped,         // parameters have been stepped
  kBeginNormPass,   // norm_pass() is entered
  kPassAfterFold,   // likewise, with gradients in the moments that are not stepped yet
  kFinishNormPass,  // it is left, and the norm is known
  kDropNormPass,    // it is left by an error
  kEndStep,         // step()
  kFail,            // a backward raised that had stepped parameters, or folded
  kAcknowledge,     // zero_grad(), after which a failure is forgotten
};

// Used with the stepper's mutex.
class StateMachine {
 public:
  StepState state() const { return state_; }
  // Throws where the event cannot happen in this state.
  void check(Event event) const;
  // Goes on to the state that the event leads to. Throws where it cannot happen; the state stays
  // then.
  void handle(Event event);
  // A backward raised that had stepped so many parameters.
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

// How many blocks of each kind are open. They hold for the backwards of all threads, and hooks ask
// without the mutex.
class OpenBlocks {
 public:
  void count(Block block, bool opens) { open_[static_cast<int>(block)] += opens ? 1 : -1; }
  bool any(Block block) const { return open_[static_cast<int>(block)] > 0; }

 private:
  std::atomic<int> open_[4] = {};
};

}  // namespace memsave_ext::adam
