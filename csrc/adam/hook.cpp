#include "adam/hook.h"

#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/autograd/variable.h>

#include "adam/stepper.h"

namespace memsave_ext::adam {

namespace py = pybind11;
namespace impl = torch::autograd::impl;

namespace {
constexpr const char* kPythonHooks = "_post_accumulate_grad_hooks";
}

void Hook::operator()(const at::Tensor& param) {
  // The dict's size without the GIL: one word, and a hook registered at this very moment may be
  // early or late.
  if (PyDict_GET_SIZE(python_hooks_) > 0) (*calls_them_)(param);
  stepper_->ready(*entry_, param);
}

Hook* find_hook(const at::Tensor& param) {
  return dynamic_cast<Hook*>(impl::post_acc_grad_hooks(param).get());
}

void install_hook(const py::object& param, std::shared_ptr<Stepper> stepper) {
  const at::Tensor& tensor = THPVariable_Unpack(param.ptr());
  auto entry = std::make_unique<Entry>();
  py::object hooks = param.attr(kPythonHooks);
  if (hooks.is_none()) {
    hooks = py::module_::import("collections").attr("OrderedDict")();
    entry->made_dict = true;
  }
  // Also fills the slot, which is empty where tensors were swapped.
  if (entry->made_dict || !impl::post_acc_grad_hooks(tensor)) param.attr(kPythonHooks) = hooks;
  auto calls_them = std::move(impl::post_acc_grad_hooks(tensor));
  TORCH_CHECK(calls_them != nullptr, "torch made no slot for post-accumulate hooks");
  impl::set_post_acc_grad_hooks(tensor, std::make_unique<Hook>(std::move(stepper), std::move(entry),
                                                               hooks.ptr(), std::move(calls_them)));
}

void remove_hook(const py::handle& param) {
  const at::Tensor& tensor = THPVariable_Unpack(param.ptr());
  Hook* hook = find_hook(tensor);
  const bool made_dict = hook->entry()->made_dict;
  auto calls_them = hook->release();
  const py::object hooks = param.attr(kPythonHooks);
  if (made_dict && (hooks.is_none() || py::len(hooks) == 0)) {
    param.attr(kPythonHooks) = py::none();
    calls_them.reset();
  }
  impl::set_post_acc_grad_hooks(tensor, std::move(calls_them));
}

}  // namespace memsave_ext::adam
