// The fake tensors of a predicted step, which have sizes and no memory. What a block is told by the
// allocator and the clock, it is told by the prediction there.
#pragma once

#include <ATen/core/Tensor.h>
#include <pybind11/pybind11.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <utility>

#include "store/store.h"

namespace memsave_ext::remat {

class KnownSteps;

class Fakes final : public store::Prediction {
 public:
  // `make` turns a tensor on the meta device into a fake one that shares its storage. `moved` is
  // called with the bytes by which what is moved elsewhere grows. `steps`: those of the prediction,
  // which count its memory.
  Fakes(pybind11::object make, pybind11::object moved, std::shared_ptr<KnownSteps> steps);
  ~Fakes() override;
  Fakes(const Fakes&) = delete;
  Fakes& operator=(const Fakes&) = delete;

  // The prediction that runs on this thread; null for none.
  static Fakes* current();
  void enter();  // for as long as this exists

  // The prediction's report: seconds that an operator would take.
  void ran(double seconds) { seconds_ += seconds; }

  // Reports of its stores: bytes that take a place there, or leave it; seconds that a copy takes.
  void moved(int64_t bytes) override;
  void copied(double seconds) override { copying_ += seconds; }
  void wait_until(double seconds) override { seconds_ = std::max(seconds_, seconds); }

  double seconds() const override { return seconds_; }
  double copying() const { return copying_; }
  std::shared_ptr<KnownSteps> steps() const { return steps_; }
  at::Tensor make(const at::Tensor& on_meta) const;

 private:
  const pybind11::object make_, moved_;
  const std::shared_ptr<KnownSteps> steps_;
  double seconds_ = 0, copying_ = 0;
};

// The storages of fake tensors are on the meta device.
inline bool is_fake(const c10::Storage& storage) { return storage.device().is_meta(); }

// The time of a clock that runs forward, in seconds.
double now();

}  // namespace memsave_ext::remat
