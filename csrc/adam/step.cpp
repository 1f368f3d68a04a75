#include "adam/step.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/record_function.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <algorithm>

#include "adam/arguments.h"
#include "adam/checks.h"
#include "adam/ops.h"

namespace memsave_ext::adam {

using at::Tensor;

namespace {

// Autograd has no part in a step: it is not differentiated, nor an in-place operation on a view.
using BelowAutograd = at::AutoDispatchBelowADInplaceOrView;

template <typename Signature>
c10::TypedOperatorHandle<Signature> find_operator(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>();
}

// Returns whether the dispatcher would only call the kernel: nobody profiles either.
bool needs_no_dispatcher(c10::ArrayRef<Parameter*> parameters) {
  return std::all_of(parameters.begin(), parameters.end(),
                     [](const Parameter* parameter) { return needs_only_kernels(*parameter); }) &&
         !parameters.front()->local.is_meta() &&
         !at::getStepCallbacksUnlessEmpty(at::RecordScope::FUNCTION);
}

}  // namespace

bool needs_only_kernels(const Parameter& parameter) {
  const auto of_thread = c10::impl::tls_local_dispatch_key_set();
  c10::DispatchKeySet keys = of_thread.included_ | parameter.local.key_set();
  keys = keys | parameter.grad.key_set();
  for (const auto& state : kStateNames) keys = keys | (parameter.state.*state.tensor).key_set();
  constexpr c10::DispatchKeySet skipped({c10::DispatchKey::Dense, c10::DispatchKey::BackendSelect});
  const auto others = keys - of_thread.excluded_ - skipped;
  return (others.raw_repr() & ~c10::full_backend_mask) == 0;
}

void step_all(c10::ArrayRef<Parameter*> parameters, const Scaling& scaling) {
  if (parameters.empty()) return;
  check_device(parameters.front()->local.device());
  const BelowAutograd guard;
  if (needs_no_dispatcher(parameters)) return step_on_device(parameters, scaling);
  static const auto step = find_operator<StepOperator>("memsave_ext::adam_step_");
  const PackedStep of = pack(parameters);
  const auto given = [](const Tensor& tensor) {
    return tensor.defined() ? std::optional(tensor) : std::nullopt;
  };
  step.call(of.params, of.grads, of.states, of.present, of.phases, of.positions, of.groups,
            of.options, of.modes, of.lrs, given(scaling.grad_scale), given(scaling.found_inf),
            given(scaling.factor), given(scaling.skip));
}

Tensor sum_of_squares(c10::ArrayRef<Tensor> grads) {
  check_device(grads.front().device());
  static const auto sum = find_operator<Tensor(at::TensorList)>("memsave_ext::adam_sum_of_squares");
  const BelowAutograd guard;
  return sum.call(grads);
}

}  // namespace memsave_ext::adam
