#include "adam/state_machine.h"

#include <c10/util/Exception.h>

namespace memsave_ext::adam {

namespace {

// Where an event leads: the numbers of states, or why it cannot happen.
enum class Next {
  kIdle,
  kStepping,
  kMeasuring,
  kClipping,
  kFailed,
  kStay,
  kKeepsAfterNorm,
  kPassTooLate,
  kStepInPass,
  kHasFailed,
};

using N = Next;

constexpr Next kTable[][5] = {
    // kIdle, kStepping, kMeasuring, kClipping, kFailed
    /* kKeepGradients */ {N::kStay, N::kStay, N::kKeepsAfterNorm, N::kKeepsAfterNorm, N::kStay},
    /* kUseGradient */ {N::kStay, N::kStay, N::kStay, N::kStay, N::kHasFailed},
    // Another backward than the one that failed may go on to its end; and one of another thread
    // steps that began before the norm pass.
    /* kStepped */ {N::kStepping, N::kStay, N::kStay, N::kStay, N::kStay},
    /* kBeginNormPass */
    {N::kMeasuring, N::kPassTooLate, N::kPassTooLate, N::kPassTooLate, N::kHasFailed},
    /* kPassAfterFold */
    {N::kPassTooLate, N::kPassTooLate, N::kPassTooLate, N::kPassTooLate, N::kHasFailed},
    /* kFinishNormPass */ {N::kStay, N::kStay, N::kClipping, N::kStay, N::kStay},
    /* kDropNormPass */ {N::kStay, N::kStay, N::kIdle, N::kStay, N::kStay},
    /* kEndStep */ {N::kStay, N::kIdle, N::kStepInPass, N::kIdle, N::kHasFailed},
    /* kFail */ {N::kFailed, N::kFailed, N::kFailed, N::kFailed, N::kStay},
    /* kAcknowledge */ {N::kStay, N::kStay, N::kStay, N::kStay, N::kIdle},
};

Next next(StepState state, Event event) {
  return kTable[static_cast<int>(event)][static_cast<int>(state)];
}

}  // namespace

void StateMachine::check(Event event) const {
  const Next to = next(state_, event);
  TORCH_CHECK(to != Next::kKeepsAfterNorm,
              "Adam: gradients are accumulated after norm_pass(), whose norm is that of one "
              "backward. Use clip_global_norm=, which clips the sum.");
  TORCH_CHECK(to != Next::kPassTooLate,
              "Adam: norm_pass() must come before the backward that steps, once in each step");
  TORCH_CHECK(to != Next::kStepInPass,
              "Adam: step() inside of norm_pass(), which only measures gradients. Run the backward "
              "again after it, and then step().");
  TORCH_CHECK(to != Next::kHasFailed, "Adam: a backward raised after ", stepped_before_failure_,
              " parameters had been stepped; the others were not. Call zero_grad() to go on from "
              "there, or load a checkpoint.");
}

void StateMachine::handle(Event event) {
  check(event);
  const Next to = next(state_, event);
  if (to != Next::kStay) state_ = static_cast<StepState>(to);
  if (state_ != StepState::kFailed) stepped_before_failure_ = 0;
}

void StateMachine::fail(int64_t stepped) {
  if (stepped == 0) return;
  handle(Event::kFail);
  stepped_before_failure_ += stepped;
}

}  // namespace memsave_ext::adam
