#include "adam/tensors.h"

#include "adam/errors.h"

namespace memsave_ext::adam {

namespace py = pybind11;

bool is_dtensor(const py::handle& tensor) {
  return !THPVariable_CheckExact(tensor.ptr()) && py::hasattr(tensor, "_local_tensor");
}

at::Tensor local_tensor(const py::handle& tensor) {
  if (!is_dtensor(tensor)) return THPVariable_Unpack(tensor.ptr());
  return THPVariable_Unpack(registered("local_tensor")(tensor).ptr());
}

at::Tensor local_gradient(const py::handle& param) {
  const py::object grad = param.attr("grad");
  if (grad.is_none()) return {};
  return THPVariable_Unpack(registered("local_gradient")(param, grad).ptr());
}

at::Tensor leave_buffer(const at::Tensor& grad, const at::Tensor& local) {
  const py::gil_scoped_acquire gil;
  const py::object left = registered("leave_buffer")(wrapped(grad), wrapped(local));
  return THPVariable_Unpack(left.ptr());
}

}  // namespace memsave_ext::adam
