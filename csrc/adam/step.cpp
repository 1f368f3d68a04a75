#include "adam/step.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include "adam/arguments.h"
#include "adam/checks.h"

namespace memsave_ext::adam {

using at::Tensor;

namespace {

// A step has no gradient, and is no in-place operation of a view: autograd has no part in it.
using BelowAutograd = at::AutoDispatchBelowADInplaceOrView;

template <typename Signature>
c10::TypedOperatorHandle<Signature> find_operator(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>();
}

}  // namespace

void step_all(c10::ArrayRef<Parameter*> parameters, const Scaling& scaling) {
  if (parameters.empty()) return;
  check_device(parameters.front()->local.device());
  static const auto step = find_operator<StepOperator>("memsave_ext::adam_step_");
  const BelowAutograd guard;
  const PackedStep of = pack(parameters);
  const auto given = [](const Tensor& tensor) {
    return tensor.defined() ? std::optional(tensor) : std::nullopt;
  };
  step.call(of.params, of.grads, of.states, of.present, of.phases, of.positions, of.groups,
            of.options, of.modes, of.lrs, given(scaling.loss_scale), given(scaling.found),
            given(scaling.factor), given(scaling.skip));
}

Tensor sum_of_squares(c10::ArrayRef<Tensor> grads) {
  check_device(grads.front().device());
  static const auto sum = find_operator<Tensor(at::TensorList)>("memsave_ext::adam_sum_of_squares");
  const BelowAutograd guard;
  return sum.call(grads);
}

}  // namespace memsave_ext::adam
