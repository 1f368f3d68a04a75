// What a hook keeps about its parameter.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>

namespace memsave_ext::adam {

class Backward;

// It has no pointer to the parameter: torch swaps tensors only where nothing else refers to them.
// Fields are read and written with the stepper's mutex held, except `made_dict` and
// `reduced_by_ddp`, which are set from Python, and `has_local_gradient`, which the hook sets.
struct Entry {
  uint64_t snapshot = 0;  // number of the last used snapshot that has the parameter
  size_t position = 0;    // of the parameter in that snapshot
  // Number of the last step that the parameter took part in; 0 where there is none. Its gradient
  // may still be queued.
  uint64_t step = 0;
  uint64_t measured = 0;               // number of the last step whose norm pass measured it, or 0
  uint64_t folded = 0;                 // number of the last step it was folded into, or 0
  const Backward* waits_in = nullptr;  // the backward that has queued its gradient, or null
  bool made_dict = false;              // the hook's installation made the dict of Python hooks
  // DistributedDataParallel reduces the gradient and then hands it over; the hook itself only sets
  // has_local_gradient.
  bool reduced_by_ddp = false;
  bool has_local_gradient = false;  // it has one that DDP has not begun to reduce
};

// Returns the parameter's name for error messages.
std::string name_of(const Entry& entry, const at::Tensor& param);

}  // namespace memsave_ext::adam
