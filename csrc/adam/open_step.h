// The step that is being made, and what backwards and step() do to it.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/ArrayRef.h>

#include <memory>
#include <optional>
#include <vector>

#include "adam/amp.h"
#include "adam/entry.h"
#include "adam/grad_norm.h"
#include "adam/records.h"
#include "adam/snapshot.h"
#include "adam/state_machine.h"

namespace memsave_ext::adam {

// What becomes of the gradients of one backward.
enum class Task { kStep, kFold, kMeasure, kAccumulate };

// An optimizer always has one: the next begins where one ends. Used with the stepper's mutex.
class OpenStep {
 public:
  StepState state() const { return machine_.state(); }
  // Throws where the event cannot happen now.
  void check(Event event) const { machine_.check(event); }
  // Throws where the gradient of this parameter cannot be used.
  void check_use(const Entry& entry, const at::Tensor& param) const;
  // The parameter takes part, or will when what waits is done.
  void note_use(Entry& entry, Task task) const;
  bool is_stepped(const Entry& entry) const { return entry.step == number_; }
  bool is_used(const Entry& entry) const { return is_stepped(entry) || entry.folded == number_; }

  // Readies a parameter for apply(). Throws where that cannot be done to it; nothing is changed
  // then.
  void prepare(Parameter& parameter, at::Tensor grad, Task task) const;
  // Does it to ready parameters on one device, and lets go of their gradients.
  void apply(c10::ArrayRef<Parameter*> parameters, Task task, const Snapshot& snapshot);
  // A backward raised that had stepped so many parameters, or folded into them.
  void fail(int64_t stepped) { machine_.fail(stepped); }

  void begin_norm_pass();
  // Without `max_norm` it is as if there had been no norm pass.
  void end_norm_pass(std::optional<double> max_norm, const at::Tensor& loss_scale);
  // The gradients of all these ready parameters will be clipped to `max_norm` together.
  void clip(const ByDevice<std::vector<Parameter*>>& parameters, double max_norm,
            const at::Tensor& loss_scale);

  bool is_folded(const Parameter& parameter) const { return records_.is_folded(parameter.state); }
  // How many parameters have gradients in their moments that are not stepped yet.
  int64_t folded() const { return records_.folded(); }

  // Returns how many parameters were stepped.
  int64_t end();
  // A failure is forgotten, and with it this step.
  void acknowledge();

  // Of all gradients, in the last step that measured it; undefined where none has.
  at::Tensor grad_norm() const;
  // Of the last step with a loss scale: for each device, 1 where a gradient was not finite.
  const std::vector<at::Tensor>& found_inf() const { return found_inf_.of_last_step(); }

 private:
  Scaling scaling(const Snapshot& snapshot, c10::Device device);
  void begin_next();

  StateMachine machine_;
  uint64_t number_ = 1;
  int64_t stepped_ = 0;
  Records records_;
  std::unique_ptr<GradNorm> norm_;  // of this step
  at::Tensor last_norm_;
  FoundInf found_inf_;
};

}  // namespace memsave_ext::adam
