// The fake tensors of a predicted step, which have sizes and no memory. What a block is told by the
// allocator and the clock, it is told by the prediction there.
#pragma once

#include <ATen/core/Tensor.h>
#include <pybind11/pybind11.h>

#include <cstdint>
#include <memory>

#include "remat/known.h"

namespace memsave_ext::remat {

class Fakes {
 public:
  // `make` turns a tensor on the meta device into a fake one that shares its storage. `counts_all`:
  // as on CUDA all memory counts, not only what a step allocates or names.
  Fakes(pybind11::object make, bool counts_all);
  ~Fakes() { leave(); }
  Fakes(const Fakes&) = delete;
  Fakes& operator=(const Fakes&) = delete;

  // The prediction that runs on this thread; null for none.
  static Fakes* current();
  void enter();
  void leave();

  // The prediction's reports: memory, by the address of its storage, and seconds that an operator
  // would take.
  void allocated(uintptr_t storage, int64_t size);
  void freed(uintptr_t storage);
  void ran(double seconds) { seconds_ += seconds; }

  double seconds() const { return seconds_; }
  std::shared_ptr<KnownSteps> steps() const { return steps_; }
  at::Tensor make(const at::Tensor& on_meta) const;

 private:
  const pybind11::object make_;
  const std::shared_ptr<KnownSteps> steps_;
  double seconds_ = 0;
};

// The storages of fake tensors are on the meta device.
inline bool is_fake(const c10::Storage& storage) { return storage.device().is_meta(); }

// The time of a clock that runs forward, in seconds.
double now();

}  // namespace memsave_ext::remat
