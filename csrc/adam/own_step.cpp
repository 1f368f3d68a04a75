#include "adam/own_step.h"

#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/autograd/variable.h>

#include "checkpoint/stepped.h"

namespace memsave_ext::adam {

namespace py = pybind11;
using at::Tensor;

namespace {

py::object tensor_or_none(const Tensor& tensor) {
  if (!tensor.defined()) return py::none();
  return py::reinterpret_steal<py::object>(THPVariable_Wrap(tensor));
}

py::object scalars_of(const Scaling& scaling) {
  if (!scaling.grad_scale.defined() && !scaling.factor.defined()) return py::none();
  return py::make_tuple(tensor_or_none(scaling.grad_scale), tensor_or_none(scaling.found_inf),
                        tensor_or_none(scaling.factor), tensor_or_none(scaling.skip));
}

// Whether more than this tensor has its memory. A prediction holds an object of Python for that of
// each fake tensor, which is on the meta device.
bool is_shared(const Tensor& grad) {
  const c10::Storage& storage = grad.storage();
  return storage.use_count() > (storage.device().is_meta() ? 2 : 1);
}

// Puts the gradient into .grad, where a step looks for it, and from where it may change it. A copy,
// where backward goes on with memory that it shares: that of a view, as in `h + param.view(...)`.
void give_gradient(const Parameter& parameter) {
  // A DTensor's gradient is there, and `grad` is the local part alone.
  if (!parameter.local.is_same(parameter.tensor)) return;
  Tensor& grad = parameter.tensor.mutable_grad();
  if (!grad.is_same(parameter.grad)) {
    grad = parameter.grad;  // DistributedDataParallel has reduced it elsewhere
  } else if (torch::autograd::get_current_graph_task_id() != -1 && is_shared(grad)) {
    grad = grad.detach().clone();
  }
}

}  // namespace

void step_by_own(const py::object& optimizer, c10::ArrayRef<Parameter*> parameters,
                 const Scaling& scaling) {
  const py::gil_scoped_acquire gil;
  const py::object owner = optimizer();
  if (owner.is_none()) return;
  py::list params(parameters.size()), groups(parameters.size());
  for (size_t i = 0; i < parameters.size(); ++i) {
    const Parameter& parameter = *parameters[i];
    give_gradient(parameter);
    params[i] = tensor_or_none(parameter.tensor);
    groups[i] = py::int_(parameter.group->position);
  }
  static PyObject* const method = PyUnicode_InternFromString("_step_by_own");
  const py::object scalars = scalars_of(scaling);
  const auto done = py::reinterpret_steal<py::object>(PyObject_CallMethodObjArgs(
      owner.ptr(), method, params.ptr(), groups.ptr(), scalars.ptr(), nullptr));
  if (!done) throw py::error_already_set();
  for (const Parameter* parameter : parameters)
    checkpoint::note_step(parameter->local, parameter->position);
}

}  // namespace memsave_ext::adam
