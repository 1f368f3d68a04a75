// The post-accumulate hook of a parameter: Python's hooks first, then the step.
//
// A tensor has one slot for such hooks, and Python's registration fills it with an object that
// calls the hooks in a dict. Ours takes the slot and keeps that object, so that Python hooks
// registered before and after run. Only a DTensor's is in the dict itself: FSDP2 calls what is
// there, and never the slot.
#pragma once

#include <pybind11/pybind11.h>
#include <torch/csrc/autograd/function_hook.h>

#include <memory>

namespace memsave_ext::adam {

class Stepper;
struct Entry;

class Hook final : public torch::autograd::PostAccumulateGradHook {
 public:
  Hook(std::shared_ptr<Stepper> stepper, std::shared_ptr<Entry> entry, PyObject* python_hooks,
       std::unique_ptr<torch::autograd::PostAccumulateGradHook> calls_them)
      : stepper_(std::move(stepper)),
        entry_(std::move(entry)),
        python_hooks_(python_hooks),
        calls_them_(std::move(calls_them)) {}

  void operator()(const at::Tensor& param) override;
  // Compiled autograd would trace it: an error that says so.
  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs& args) const override;

  const Stepper* stepper() const { return stepper_.get(); }
  const std::shared_ptr<Entry>& entry() const { return entry_; }
  std::unique_ptr<torch::autograd::PostAccumulateGradHook> release() {
    return std::move(calls_them_);
  }

 private:
  std::shared_ptr<Stepper> stepper_;
  std::shared_ptr<Entry> entry_;
  PyObject* python_hooks_;  // the dict, which calls_them_ owns
  std::unique_ptr<torch::autograd::PostAccumulateGradHook> calls_them_;
};

// The hook of a DTensor: a Python callable.
struct DTensorHook {
  std::shared_ptr<Stepper> stepper;
  std::shared_ptr<Entry> entry;

  void operator()(const pybind11::object& param) const;
};

// A parameter's hook, of whichever kind; empty where it has none.
struct Attachment {
  const Stepper* stepper = nullptr;
  std::shared_ptr<Entry> entry;
};

// All need the GIL.

Attachment find_hook(const pybind11::handle& param);

// There must be none yet.
void install_hook(const pybind11::object& param, std::shared_ptr<Stepper> stepper);

// Gives the slot back as it was. There must be one.
void remove_hook(const pybind11::handle& param);

}  // namespace memsave_ext::adam
