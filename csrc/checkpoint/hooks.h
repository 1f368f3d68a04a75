// The Python objects behind a region's saved-tensor hooks. torch calls hooks through Python; these
// are C functions there, so that no Python code runs per tensor.
#pragma once

#include <ATen/SavedTensorHooks.h>
#include <pybind11/pybind11.h>

#include <memory>

namespace memsave_ext {

class Holder;
class Region;
class Recompute;

// Called once, at import.
void init_hooks();

// What a pack hook does: with region set it saves a forward's tensors, with run a recompute's, with
// neither (out of its scope) it keeps tensors as they are.
struct Packing {
  std::shared_ptr<Region> region;
  Recompute* run = nullptr;  // outlives the hook's scope
};

pybind11::object make_packer(Packing packing);
// The packing of a pack hook, or nullptr when the object is not one of ours.
Packing* as_packing(PyObject* object);

// Python's view of a holder; the unpack hook opens it.
pybind11::object make_holder(const Holder& holder);
PyObject* unpack_function();  // borrowed

// The exception by which a recompute leaves the function early.
PyObject* stop_exception();
[[noreturn]] void throw_stop();

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
