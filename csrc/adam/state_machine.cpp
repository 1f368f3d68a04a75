#include "adam/state_machine.h"

#include "adam/given.h"

namespace memsave_ext::adam {

namespace {

Transitions& transitions() {
  static Transitions table;
  return table;
}

}  // namespace

void give_transitions(Transitions table) { transitions() = std::move(table); }

StepState StateMachine::check(Event event) const {
  const auto& next = transitions()[static_cast<int>(event)][static_cast<int>(state_)];
  if (const auto* state = std::get_if<int64_t>(&next)) return static_cast<StepState>(*state);
  throw_error("impossible", std::get<std::string>(next), stepped_before_failure_);
}

void StateMachine::handle(Event event) {
  state_ = check(event);
  if (state_ != StepState::kFailed) stepped_before_failure_ = 0;
}

void StateMachine::fail(int64_t stepped) {
  if (stepped == 0) return;
  handle(Event::kFail);
  stepped_before_failure_ += stepped;
}

}  // namespace memsave_ext::adam
