#include "adam/open_step.h"

#include <algorithm>
#include <utility>

#include "adam/given.h"
#include "adam/own_step.h"

namespace memsave_ext::adam {

using at::Tensor;

namespace {

constexpr int kEvents = static_cast<int>(Event::kLoad) + 1;
constexpr int kStates = static_cast<int>(StepState::kFailed) + 1;

// What give_transitions() was given: a state, or below 0 the reason why there is none.
int8_t next_states[kEvents][kStates];
std::vector<std::string> reasons;

}  // namespace

void give_transitions(const Transitions& table) {
  TORCH_CHECK(table.size() == kEvents, "memsave_ext: the table of transitions is another build's");
  for (int event = 0; event < kEvents; ++event) {
    for (int state = 0; state < kStates; ++state) {
      const auto& next = table.at(event).at(state);
      if (const auto* reason = std::get_if<std::string>(&next)) reasons.push_back(*reason);
      next_states[event][state] = static_cast<int8_t>(
          next.index() == 0 ? std::get<int64_t>(next) : -static_cast<int64_t>(reasons.size()));
    }
  }
}

StepState StateMachine::check(Event event) const {
  const int next = next_states[static_cast<int>(event)][static_cast<int>(state_)];
  if (next < 0) throw_error("impossible", reasons[-next - 1], stepped_before_failure_);
  return static_cast<StepState>(next);
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

void OpenStep::check_use(const Entry& entry, const Tensor& param) const {
  machine_.check(Event::kUseGradient);
  const bool measures = state() == StepState::kMeasuring;
  const bool is_measured = entry.measured == number_;
  if (measures ? is_measured : is_stepped(entry)) {
    throw_error("second_gradient", name_of(entry, param));
  }
  if (state() == StepState::kClipping && !is_measured) {
    throw_error("not_measured", name_of(entry, param));
  }
}

void OpenStep::note_use(Entry& entry, GradientAction action) const {
  if (action == GradientAction::kStep) entry.step = number_;
  if (action == GradientAction::kMeasure) entry.measured = number_;
}

void OpenStep::prepare(Parameter& parameter, Tensor grad, GradientAction action) const {
  if (action == GradientAction::kMeasure) {
    parameter.grad = std::move(grad);
    return;
  }
  const bool folded = is_folded(parameter);
  const auto phase = action == GradientAction::kFold
                         ? (folded ? StepPhase::kFold : StepPhase::kFirstFold)
                         : (folded ? StepPhase::kClose : StepPhase::kWhole);
  adam::prepare(parameter, std::move(grad), phase);
}

void OpenStep::apply(c10::ArrayRef<Parameter*> parameters, GradientAction action,
                     const Snapshot& snapshot) {
  if (parameters.empty()) return;
  if (action == GradientAction::kMeasure) {
    if (norm_) norm_->add(parameters);  // null where the pass has been dropped
  } else {
    step(parameters, scaling(snapshot, parameters.front()->local.device()));
  }
  if (action == GradientAction::kStep) {
    machine_.handle(Event::kStepped);
    stepped_ += static_cast<int64_t>(parameters.size());
  }
  for (Parameter* parameter : parameters) {
    parameter->grad.reset();
    if (action == GradientAction::kFold) parameter->entry->folded = number_;
  }
}

void OpenStep::step(c10::ArrayRef<Parameter*> parameters, const Scaling& scaling) {
  if (parameters.front()->group->algorithm != Algorithm::kOwn) {
    return step_shards(parameters, scaling);
  }
  try {
    step_by_own(optimizer_, parameters, scaling);
  } catch (...) {
    machine_.fail(static_cast<int64_t>(parameters.size()));  // which of them were stepped?
    throw;
  }
}

void OpenStep::step_shards(c10::ArrayRef<Parameter*> parameters, const Scaling& scaling) {
  const bool scaled = scaling.grad_scale.defined();
  const auto asks = [&](const Parameter* parameter) {
    return !scaling.factor.defined() && asks_other_shards(*parameter, scaled);
  };
  if (std::none_of(parameters.begin(), parameters.end(), asks)) {
    return records_.step(parameters, scaling);
  }
  for (const auto& part : parts_that_agree(parameters, scaled)) {
    records_.step(part, asks(part.front()) ? agree(part, scaling) : scaling);
  }
}

const char* OpenStep::obstacle_to_rows(const Parameter& parameter, const Snapshot& snapshot) const {
  if (state() != StepState::kIdle && state() != StepState::kStepping) {
    return "the norm of all gradients is measured, or clips them, or an earlier backward raised";
  }
  if (parameter.group->algorithm == Algorithm::kOwn) return "the optimizer's own step() steps it";
  if (is_used(*parameter.entry)) return "the optimizer has had a gradient of it in this step";
  if (is_folded(parameter)) return "gradients are folded into its moments";
  if (parameter.group->max_grad_norm > 0) return "max_grad_norm clips by the norm of all of it";
  if (snapshot.grad_scale.defined()) return "a GradScaler leaves out gradients that are not finite";
  return StepInRows::obstacle(parameter);
}

std::unique_ptr<StepInRows> OpenStep::step_in_rows(const Parameter& parameter) {
  auto begun = records_.step_in_rows(parameter);
  machine_.handle(Event::kStepped);
  ++stepped_;
  note_use(*parameter.entry, GradientAction::kStep);
  return begun;
}

Scaling OpenStep::scaling(const Snapshot& snapshot, c10::Device device) {
  if (norm_) {
    for (const auto& group : snapshot.groups) {
      if (group.max_grad_norm > 0) throw_error("two_norms");
    }
    return norm_->scaling(device);
  }
  if (!snapshot.grad_scale.defined()) return {};
  return {snapshot.grad_scale.to(device), found_inf_.on(device), {}, {}};
}

void OpenStep::begin_norm_pass() {
  machine_.handle(folded() > 0 ? Event::kPassAfterFold : Event::kBeginNormPass);
  norm_ = std::make_unique<GradNorm>();
}

void OpenStep::end_norm_pass(std::optional<double> max_norm, const Tensor& grad_scale,
                             c10::ArrayRef<Tensor> sharded) {
  machine_.handle(max_norm ? Event::kFinishNormPass : Event::kDropNormPass);
  if (!norm_) return;  // zero_grad() has ended the step of the pass
  if (max_norm) {
    norm_->finish(*max_norm, grad_scale, sharded);
  } else {
    norm_.reset();
    ++number_;
  }
}

void OpenStep::clip(const ByDevice<std::vector<Parameter*>>& parameters, double max_norm,
                    const Tensor& grad_scale, c10::ArrayRef<Tensor> sharded) {
  norm_ = std::make_unique<GradNorm>();
  for (const auto& [device, of_device] : parameters) norm_->add(of_device);
  norm_->finish(max_norm, grad_scale, sharded);
}

int64_t OpenStep::end() {
  machine_.handle(Event::kEndStep);
  // Those that are left belong to parameters that are not in param_groups any more.
  records_.forget_folded();
  const int64_t stepped = stepped_;
  begin_next();
  return stepped;
}

void OpenStep::acknowledge() {
  if (state() != StepState::kFailed) return;
  machine_.handle(Event::kAcknowledge);
  begin_next();
}

void OpenStep::restart() {
  machine_.handle(Event::kLoad);
  records_.forget_folded();
  begin_next();
  if (state() == StepState::kMeasuring) norm_ = std::make_unique<GradNorm>();
}

void OpenStep::begin_next() {
  ++number_;
  stepped_ = 0;
  found_inf_.end_step(norm_ ? norm_->found_inf() : Tensor());
  if (norm_) last_norm_ = norm_->norm();
  norm_.reset();
}

Tensor OpenStep::grad_norm() const {
  return norm_ && norm_->norm().defined() ? norm_->norm() : last_norm_;
}

}  // namespace memsave_ext::adam
