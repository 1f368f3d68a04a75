#include "adam/amp.h"

#include <ATen/ops/maximum.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/python_variable.h>

namespace memsave_ext::adam {

namespace py = pybind11;
using at::Tensor;

Tensor read_grad_scale(const py::handle& optimizer) {
  const py::object scaler = optimizer.attr("grad_scaler");
  if (scaler.is_none() || PyObject_IsTrue(scaler.attr("is_enabled")().ptr()) != 1) return {};
  const py::object scale = scaler.attr("_get_scale_async")();
  return THPVariable_Check(scale.ptr()) ? THPVariable_Unpack(scale.ptr()) : Tensor();
}

const Tensor& FoundInf::on(c10::Device device) {
  Tensor& found_inf = now_.here(device);
  if (!found_inf.defined()) found_inf = at::zeros({}, at::TensorOptions(device).dtype(at::kFloat));
  return found_inf;
}

void FoundInf::end_step(const Tensor& of_norm) {
  last_.clear();
  const auto either = [](const Tensor& a, const Tensor& b) { return at::maximum(a, b); };
  for (const auto& [device, found_inf] : now_.combined(either)) last_.push_back(found_inf);
  if (of_norm.defined()) last_.push_back(of_norm);
  now_.clear();
}

}  // namespace memsave_ext::adam
