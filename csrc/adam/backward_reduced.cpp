// Gradients that DistributedDataParallel has reduced.
#include <vector>

#include "adam/backward.h"
#include "adam/stepper.h"

namespace memsave_ext::adam {

using at::Tensor;

void Backward::add_reduced(Parameter& parameter, const Tensor& grad) {
  Entry& entry = *parameter.entry;
  stepper_->open_step().note_use(entry, action_);
  entry.waits_in = this;
  Bucket& bucket = bucket_of(parameter.local, Kind::kPlain);
  const auto bytes = static_cast<int64_t>(grad.nbytes());
  bucket.waiting.push_back({&parameter, {}, grad.clone(), {}, bytes, true});  // DDP reuses memory
  bucket.bytes += bytes;
  parameter.tensor.mutable_grad().reset();
}

void Backward::step_reduced(const std::vector<std::shared_ptr<Entry>>& entries,
                            const std::vector<Tensor>& grads) {
  {
    const std::lock_guard<std::mutex> lock(stepper_->mutex());
    OpenStep& step = stepper_->open_step();
    step.check(Event::kUseGradient);
    std::vector<Parameter*> ready;
    for (size_t i = 0; i < entries.size(); ++i) {
      if (!has(*entries[i])) continue;  // not in param_groups any more
      Parameter& parameter = parameter_of(*entries[i]);
      if (!finished_ && is_awaited(parameter)) {
        add_reduced(parameter, grads[i]);
        continue;
      }
      ready.push_back(&parameter);
      step.prepare(parameter, grads[i], action_);
    }
    apply(ready);
    for (Parameter* parameter : ready) {
      step.note_use(*parameter->entry, action_);
      parameter->tensor.mutable_grad().reset();
    }
  }
  publish();
}

}  // namespace memsave_ext::adam
