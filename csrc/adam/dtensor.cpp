#include "adam/dtensor.h"

#include <torch/csrc/autograd/python_variable.h>

namespace memsave_ext::adam {

namespace py = pybind11;

namespace {

py::object helper(const char* name) {
  return py::module_::import("memsave_ext.adam.dtensor").attr(name);
}

}  // namespace

bool is_dtensor(const py::handle& tensor) {
  return !THPVariable_CheckExact(tensor.ptr()) && py::hasattr(tensor, "_local_tensor");
}

at::Tensor local_tensor(const py::handle& tensor) {
  if (!is_dtensor(tensor)) return THPVariable_Unpack(tensor.ptr());
  return THPVariable_Unpack(helper("local_tensor")(tensor).ptr());
}

at::Tensor local_gradient(const py::handle& param) {
  const at::Tensor& grad = THPVariable_Unpack(param.ptr()).grad();
  if (!grad.defined() || !is_dtensor(param)) return grad;
  const py::object local = helper("local_gradient")(param, param.attr("grad"));
  return THPVariable_Unpack(local.ptr());
}

py::object as_placed(const py::handle& param, const at::Tensor& local) {
  auto tensor = py::reinterpret_steal<py::object>(THPVariable_Wrap(local));
  return is_dtensor(param) ? helper("as_placed")(param, tensor) : tensor;
}

}  // namespace memsave_ext::adam
