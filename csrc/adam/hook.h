// The post-accumulate hook of a parameter: Python's hooks first, then the step.
//
// A tensor has one slot for such hooks, and registration from Python fills it with an object that
// calls all hooks of a dict. Ours takes the slot and keeps that object, so that Python hooks run
// whether they were registered before or after it. Only a DTensor's hook is in the dict itself:
// FSDP2 calls the hooks of the dict, and never the slot.
#pragma once

#include <pybind11/pybind11.h>
#include <torch/csrc/autograd/function_hook.h>

#include <memory>

namespace memsave_ext::adam {

class Collector;
struct Entry;

class Hook final : public torch::autograd::PostAccumulateGradHook {
 public:
  Hook(std::shared_ptr<Collector> collector, std::shared_ptr<Entry> entry, PyObject* python_hooks,
       std::unique_ptr<torch::autograd::PostAccumulateGradHook> calls_them)
      : collector_(std::move(collector)),
        entry_(std::move(entry)),
        python_hooks_(python_hooks),
        calls_them_(std::move(calls_them)) {}

  void operator()(const at::Tensor& param) override;
  // Throws: compiled autograd, which calls it, cannot trace this hook.
  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs& args) const override;

  Collector* collector() const { return collector_.get(); }
  const std::shared_ptr<Entry>& entry() const { return entry_; }
  // Gives up the object that calls the Python hooks.
  std::unique_ptr<torch::autograd::PostAccumulateGradHook> release() {
    return std::move(calls_them_);
  }

 private:
  std::shared_ptr<Collector> collector_;
  std::shared_ptr<Entry> entry_;
  PyObject* python_hooks_;  // the dict; borrowed, calls_them_ owns it
  std::unique_ptr<torch::autograd::PostAccumulateGradHook> calls_them_;
};

// The hook of a DTensor: a Python callable.
struct DTensorHook {
  std::shared_ptr<Collector> collector;
  std::shared_ptr<Entry> entry;

  void operator()(const pybind11::object& param) const;
};

// What find_hook() finds, in the slot or in the dict; both are null where there is no hook.
struct Attachment {
  Collector* collector = nullptr;
  std::shared_ptr<Entry> entry;
};

// All functions need the GIL.

Attachment find_hook(const pybind11::handle& param);

// Whether Python hooks beside ours are called with the parameter's gradient; those do not count
// that only watch, which an attribute says.
bool has_python_hooks(const pybind11::handle& param);

// The parameter must not have a hook of ours yet.
void install_hook(const pybind11::object& param, std::shared_ptr<Collector> collector);

// Restores the slot, or removes the hook from the dict. The parameter must have a hook.
void remove_hook(const pybind11::handle& param);

}  // namespace memsave_ext::adam
