// What a hook knows of its parameter.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>

namespace memsave_ext::adam {

class Backward;

// It has no pointer to the parameter: torch swaps tensors only where there is none. All of it is
// read and written with the stepper's mutex, but `made_dict` and `reduced_by_ddp`, which Python
// sets.
struct Entry {
  // Where the parameter stands in the snapshot that was taken last.
  uint64_t snapshot = 0;  // its number
  size_t position = 0;
  // The step it took part in last. Its gradient may still wait in a bucket.
  uint64_t step = 0;
  uint64_t measured = 0;               // likewise, in a norm pass
  uint64_t folded = 0;                 // likewise, into its moments
  const Backward* waits_in = nullptr;  // a bucket of this one
  bool made_dict = false;              // of Python hooks, which was not there
  // DistributedDataParallel reduces its gradient and then says so, and its hook only notes that
  // there is one.
  bool reduced_by_ddp = false;
  bool has_local_gradient = false;  // since the last step
};

// The parameter's name in errors.
std::string name_of(const Entry& entry, const at::Tensor& param);

}  // namespace memsave_ext::adam
