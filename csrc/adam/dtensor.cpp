#include "adam/dtensor.h"

#include <torch/csrc/autograd/python_variable.h>

#include "adam/given.h"

namespace memsave_ext::adam {

namespace py = pybind11;

namespace {

py::object wrapped(const at::Tensor& tensor) {
  return py::reinterpret_steal<py::object>(THPVariable_Wrap(tensor));
}

}  // namespace

bool is_dtensor(const py::handle& tensor) {
  return !THPVariable_CheckExact(tensor.ptr()) && py::hasattr(tensor, "_local_tensor");
}

at::Tensor local_tensor(const py::handle& tensor) {
  if (!is_dtensor(tensor)) return THPVariable_Unpack(tensor.ptr());
  return THPVariable_Unpack(given("local_tensor")(tensor).ptr());
}

at::Tensor local_gradient(const py::handle& param) {
  const at::Tensor& grad = THPVariable_Unpack(param.ptr()).grad();
  if (!grad.defined() || !is_dtensor(param)) return grad;
  const py::object local = given("local_gradient")(param, param.attr("grad"));
  return THPVariable_Unpack(local.ptr());
}

at::Tensor leave_buffer(const at::Tensor& grad, const at::Tensor& local) {
  const py::gil_scoped_acquire gil;
  const py::object left = given("leave_buffer")(wrapped(grad), wrapped(local));
  return THPVariable_Unpack(left.ptr());
}

Sharding sharding_of(const at::Tensor& param) {
  const py::gil_scoped_acquire gil;
  const py::tuple found = given("sharding_of")(wrapped(param));
  return {found[0].cast<int64_t>(), found[1].cast<int64_t>()};
}

}  // namespace memsave_ext::adam
