// The Python objects behind a region's saved-tensor hooks. torch calls hooks through Python; these
// are C functions there, so that no Python code runs per tensor.
#pragma once

#include <ATen/SavedTensorHooks.h>
#include <pybind11/pybind11.h>

#include <memory>

namespace memsave_ext {

class Region;
class Recompute;

// Called once, at import.
void init_hooks();

// What autograd keeps in place of the tensor saved at `index`.
pybind11::object make_holder(std::shared_ptr<Region> region, size_t index);

// Pack hooks, for the forward and for a recompute. `run` must outlive the hook's scope.
pybind11::object make_packer(std::shared_ptr<Region> region);
pybind11::object make_packer(Recompute& run);

// The exception by which a recompute leaves the function early.
PyObject* stop_exception();

// Pushes a pack hook, with the one unpack hook that opens holders, for a scope. A copy of the hook
// stack that outlives the scope (another thread's) finds a hook that keeps tensors as they are.
class HookGuard {
 public:
  explicit HookGuard(pybind11::object packer);
  ~HookGuard();
  HookGuard(const HookGuard&) = delete;
  HookGuard& operator=(const HookGuard&) = delete;

 private:
  pybind11::object packer_;
};

}  // namespace memsave_ext
