#include "remat/fakes.h"

#include <torch/csrc/autograd/python_variable.h>

#include <chrono>
#include <utility>

namespace memsave_ext::remat {
namespace {

thread_local Fakes* current_fakes = nullptr;

}  // namespace

Fakes::Fakes(pybind11::object make, pybind11::object moved, std::shared_ptr<KnownSteps> steps)
    : make_(std::move(make)), moved_(std::move(moved)), steps_(std::move(steps)) {}

Fakes::~Fakes() {
  if (current_fakes == this) current_fakes = nullptr;
}

Fakes* Fakes::current() { return current_fakes; }

void Fakes::enter() { current_fakes = this; }

void Fakes::moved(int64_t bytes) {
  const pybind11::gil_scoped_acquire gil;
  moved_(bytes);
}

at::Tensor Fakes::make(const at::Tensor& on_meta) const {
  const pybind11::gil_scoped_acquire gil;
  const auto wrapped = pybind11::reinterpret_steal<pybind11::object>(THPVariable_Wrap(on_meta));
  const pybind11::object made = make_(wrapped);
  TORCH_INTERNAL_ASSERT(THPVariable_Check(made.ptr()));
  return THPVariable_Unpack(made.ptr());
}

double now() {
  if (current_fakes != nullptr) return current_fakes->seconds();
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

}  // namespace memsave_ext::remat
