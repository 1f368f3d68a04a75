#include "adam/hook.h"

#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/autograd/variable.h>

#include <typeinfo>

#include "adam/collector.h"
#include "adam/errors.h"
#include "adam/parameter.h"

namespace memsave_ext::adam {

namespace py = pybind11;
namespace impl = torch::autograd::impl;

namespace {

constexpr const char* kPythonHooks = "_post_accumulate_grad_hooks";  // the attribute with the dict
constexpr const char* kOurs = "memsave_ext.adam";                    // the key in that dict
constexpr const char* kWatches = "_memsave_ext_watches";  // of a hook that needs no gradient

Hook* hook_in_slot(const at::Tensor& param) {
  // A parameter that never required a gradient has no slot.
  if (impl::get_autograd_meta(param) == nullptr) return nullptr;
  auto* const hook = impl::post_acc_grad_hooks(param).get();
  // Hook is final, so comparing types is enough, and cheaper than a dynamic_cast.
  return hook != nullptr && typeid(*hook) == typeid(Hook) ? static_cast<Hook*>(hook) : nullptr;
}

// Returns the dict of Python hooks; None where there is none.
py::object hooks_of(const py::handle& param) { return param.attr(kPythonHooks); }

py::object hook_in_dict(const py::handle& param) {
  const py::object hooks = hooks_of(param);
  return hooks.is_none() ? hooks : hooks.attr("get")(kOurs);
}

// Returns the dict, and makes it where there is none.
py::object make_hooks(const py::object& param, Entry& entry) {
  py::object hooks = hooks_of(param);
  if (!hooks.is_none()) return hooks;
  entry.made_dict = true;
  hooks = py::module_::import("collections").attr("OrderedDict")();
  param.attr(kPythonHooks) = hooks;
  return hooks;
}

}  // namespace

void Hook::operator()(const at::Tensor& param) {
  // Reads the dict's size without the GIL: it is one word, and a hook that is registered at this
  // very moment may run or not.
  if (PyDict_GET_SIZE(python_hooks_) > 0) {
    (*calls_them_)(param);
    // One of them may have removed this hook, which is destroyed then.
    if (impl::post_acc_grad_hooks(param).get() != this) return;
  }
  collector_->ready(*entry_, param, true);
}

void Hook::compiled_args(torch::dynamo::autograd::CompiledNodeArgs&) const {
  throw_error("compiled_autograd");
}

void DTensorHook::operator()(const py::object& param) const {
  const at::Tensor& tensor = THPVariable_Unpack(param.ptr());
  const py::object hooks = hooks_of(param);
  const bool is_last = py::object(py::list(hooks)[py::len(hooks) - 1]).equal(py::str(kOurs));
  const py::gil_scoped_release no_gil;
  collector->ready(*entry, tensor, is_last, [&param] {
    const py::gil_scoped_acquire gil;
    return local_gradient(param);
  });
}

Attachment find_hook(const py::handle& param) {
  if (is_dtensor(param)) {
    const py::object found = hook_in_dict(param);
    if (found.is_none()) return {};
    const auto& hook = found.cast<const DTensorHook&>();
    return {hook.collector.get(), hook.entry};
  }
  const Hook* hook = hook_in_slot(THPVariable_Unpack(param.ptr()));
  if (hook == nullptr) return {};
  return {hook->collector(), hook->entry()};
}

bool has_python_hooks(const py::handle& param) {
  const py::object hooks = hooks_of(param);
  if (hooks.is_none()) return false;
  for (const auto& [key, hook] : hooks.cast<py::dict>()) {
    if (!py::hasattr(hook, kWatches)) return true;
  }
  return false;
}

void install_hook(const py::object& param, std::shared_ptr<Collector> collector) {
  const at::Tensor& tensor = THPVariable_Unpack(param.ptr());
  auto entry = std::make_shared<Entry>();
  const py::object hooks = make_hooks(param, *entry);
  if (is_dtensor(param)) {
    hooks[kOurs] = DTensorHook{std::move(collector), std::move(entry)};
    return;
  }
  impl::materialize_autograd_meta(tensor);
  // Swapping tensors can leave the slot empty; setting the attribute fills it again.
  if (!impl::post_acc_grad_hooks(tensor)) param.attr(kPythonHooks) = hooks;
  auto calls_them = std::move(impl::post_acc_grad_hooks(tensor));
  TORCH_CHECK(calls_them != nullptr, "torch made no slot for post-accumulate hooks");
  impl::set_post_acc_grad_hooks(
      tensor, std::make_unique<Hook>(std::move(collector), std::move(entry), hooks.ptr(),
                                     std::move(calls_them)));
}

void remove_hook(const py::handle& param) {
  const at::Tensor& tensor = THPVariable_Unpack(param.ptr());
  const bool made_dict = find_hook(param).entry->made_dict;
  const py::object hooks = hooks_of(param);
  std::unique_ptr<torch::autograd::PostAccumulateGradHook> calls_them;
  if (is_dtensor(param)) {
    hooks.attr("pop")(kOurs);
  } else {
    calls_them = hook_in_slot(tensor)->release();
  }
  if (made_dict && (hooks.is_none() || py::len(hooks) == 0)) {
    param.attr(kPythonHooks) = py::none();
    calls_them.reset();
  }
  if (!is_dtensor(param)) impl::set_post_acc_grad_hooks(tensor, std::move(calls_them));
}

}  // namespace memsave_ext::adam
