// Saved-tensor hooks without Python code. torch calls hooks through Python, where these are C
// functions, so that no Python code runs for a tensor. With an engine in front of torch's, autograd
// calls the packers directly.
#pragma once

#include <ATen/SavedTensorHooks.h>
#include <ATen/core/Tensor.h>
#include <pybind11/pybind11.h>

#include <cstddef>
#include <memory>

namespace memsave_ext::checkpoint {

// What autograd holds in place of a tensor that it saved.
class Saved {
 public:
  virtual ~Saved() = default;
  virtual at::Tensor open() = 0;
};

// What a pack hook does with a tensor that autograd saves.
class Packer {
 public:
  virtual ~Packer() = default;
  // Called for each tensor before it is saved. False: autograd saves it as without hooks.
  virtual bool takes_next() { return true; }
  // Returns null to keep the tensor as it is, or the alias that this puts in its place.
  virtual std::shared_ptr<Saved> pack(at::Tensor& tensor) = 0;
};

// Called once, at import.
void init_hooks();

// The packer behind the topmost hook of torch's stack; null where that hook is not ours.
std::shared_ptr<Packer> packer_of(PyObject* hook);

// Wraps it for Python; the unpack hook opens it.
pybind11::object wrap_saved(std::shared_ptr<Saved> saved);
PyObject* unpack_function();  // borrowed

// The exception by which a recompute leaves the function early.
PyObject* stop_exception();
[[noreturn]] void throw_stop();

// Pushes a packer's hooks for a scope. A copy of the hook stack that outlives the scope (another
// thread's) finds a hook that keeps tensors as they are. Needs the GIL.
class HookGuard {
 public:
  explicit HookGuard(std::shared_ptr<Packer> packer);
  ~HookGuard();
  HookGuard(const HookGuard&) = delete;
  HookGuard& operator=(const HookGuard&) = delete;

 private:
  pybind11::object hook_;
};

// Puts an engine in front of torch's that, while enabled, gives a region's saved tensors C++ hooks.
// It forwards everything else. The engine is installed by the first call with true, process-wide,
// and stays; disabled, it only forwards. Returns what was set before.
bool use_engine_hooks(bool enabled);

// Has this thread run all nodes of its backwards by itself, for good. For a forked child, which has
// no other thread, and which torch's engine refuses after it has started some in the parent.
void run_backwards_alone();
// Takes the place of run_backward() of torch's engine for Python there, which knows no other
// engine.
PyObject* run_backward(PyObject*, PyObject* args, PyObject* kwargs);

// While it lives, the engine gives the packer what autograd saves on this thread, unless a hook was
// pushed since. It is not on torch's stack of hooks, because torch.func transforms run only where
// that is empty; what they save is kept. Scopes of a thread are nested.
class EngineHookGuard {
 public:
  explicit EngineHookGuard(std::shared_ptr<Packer> packer);
  ~EngineHookGuard();
  EngineHookGuard(const EngineHookGuard&) = delete;
  EngineHookGuard& operator=(const EngineHookGuard&) = delete;

  // The packer of this thread's innermost scope; null where a hook was pushed since.
  static std::shared_ptr<Packer> packer();

 private:
  const std::shared_ptr<Packer> packer_;
  const size_t depth_;  // of torch's stack of hooks when it was made
  EngineHookGuard* const outer_;
};

}  // namespace memsave_ext::checkpoint
