#include "adam/state_machine.h"

#include "adam/given.h"

namespace memsave_ext::adam {

namespace {

// Where an event leads: to a state, numbered as in StepState, or nowhere, or it cannot happen. The
// reasons for that are in the order of `reasons` in check().
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
    // Allowed in every state: after a failure, another backward may go on to its end; in a norm
    // pass, a backward of another thread may step that began before the pass.
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
    /* kLoad */ {N::kStay, N::kIdle, N::kStay, N::kIdle, N::kIdle},
};

Next next(StepState state, Event event) {
  return kTable[static_cast<int>(event)][static_cast<int>(state)];
}

}  // namespace

void StateMachine::check(Event event) const {
  static constexpr const char* reasons[] = {"keeps_after_norm", "pass_too_late", "step_in_pass",
                                            "has_failed"};
  const int reason =
      static_cast<int>(next(state_, event)) - static_cast<int>(Next::kKeepsAfterNorm);
  if (reason >= 0) throw_error("impossible", reasons[reason], stepped_before_failure_);
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
