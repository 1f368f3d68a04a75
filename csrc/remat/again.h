// How an operator is called when it is repeated.
#pragma once

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include "remat/pause.h"

namespace memsave_ext::remat {

class AgainScope {
  const Pause pause_;
  // As in the forward: below autograd, with gradients enabled. Kernels may look at the latter, as
  // oneDNN's LSTM, which makes a workspace for its backward only then.
  const at::AutoGradMode grad_mode_{true};
  const at::AutoDispatchBelowAutograd below_autograd_;
  const c10::impl::ExcludeDispatchKeyGuard no_autocast_{c10::autocast_dispatch_keyset};
};

}  // namespace memsave_ext::remat
