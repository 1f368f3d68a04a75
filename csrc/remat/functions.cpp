#include "remat/functions.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <utility>

namespace memsave_ext::remat {
namespace {

// In place of an overload's.
constexpr const char* kOverload = "autograd_Function";

}  // namespace

FunctionCall::~FunctionCall() {
  const pybind11::gil_scoped_acquire gil;
  call_ = pybind11::object();
}

std::vector<at::Tensor> FunctionCall::operator()(const std::vector<at::Tensor>& tensors) const {
  // As in the forward of a Function: without gradients, above autograd.
  const at::NoGradGuard no_grad;
  const auto keys = c10::impl::tls_local_dispatch_key_set();
  const c10::impl::ForceDispatchKeyGuard above_autograd(
      keys.included_, keys.excluded_ - c10::autograd_dispatch_keyset_with_ADInplaceOrView);
  const pybind11::gil_scoped_acquire gil;
  return new_ones(call_(tensors).cast<std::vector<at::Tensor>>(), tensors);
}

std::vector<at::Tensor> new_ones(std::vector<at::Tensor> results,
                                 const std::vector<at::Tensor>& given) {
  const auto is_given = [&](const at::Tensor& result) {
    return !result.has_storage() ||
           std::any_of(given.begin(), given.end(), [&](const auto& tensor) {
             return tensor.has_storage() && tensor.is_alias_of(result);
           });
  };
  results.erase(std::remove_if(results.begin(), results.end(), is_given), results.end());
  return results;
}

c10::OperatorName declare_function(const std::string& name) {
  const auto tensors = c10::ListType::ofTensors();
  c10::FunctionSchema schema(
      name, kOverload,
      std::vector<c10::Argument>{
          {"tensors", tensors}, {"call", c10::AnyType::get()}, {"key", c10::IntType::get()}},
      std::vector<c10::Argument>{{"", tensors}});
  // Without a kernel: the schema is for names alone, and stays for the life of the process.
  static auto& registered = *new std::vector<c10::RegistrationHandleRAII>();
  registered.push_back(
      c10::Dispatcher::singleton().registerDef(std::move(schema), "memsave_ext.remat", {}));
  return {name, kOverload};
}

bool is_function_name(const c10::OperatorName& name) { return name.overload_name == kOverload; }

void call_function(std::vector<c10::IValue>& stack) {
  const std::vector<at::Tensor> tensors = stack.at(0).toTensorVector();
  const auto call = c10::static_intrusive_pointer_cast<FunctionCall>(stack.at(1).toCapsule());
  stack = {(*call)(tensors)};
}

}  // namespace memsave_ext::remat
