#include "adam/batch.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/stack.h>
#include <torch/csrc/Device.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <utility>

#include "adam/collector.h"
#include "adam/ops.h"
#include "adam/parameter.h"
#include "adam/snapshot.h"
#include "checkpoint/stepped.h"

namespace memsave_ext::adam {

namespace py = pybind11;
using at::Tensor;

bool asks_other_shards(const Parameter& parameter, Asks asks) {
  if (asks == Asks::kNever || !is_dtensor(parameter)) return false;
  return (asks == Asks::kAlways || parameter.group->max_grad_norm > 0) &&
         sharding_of(parameter).number != 0;
}

Scaling read_scaling(const py::handle& scaling) {
  if (scaling.is_none()) return {};
  const auto read = [&](size_t i) {
    PyObject* const value = PyTuple_GET_ITEM(scaling.ptr(), i);
    return value == Py_None ? Tensor() : THPVariable_Unpack(value);
  };
  return {read(0), read(1), read(2), read(3)};
}

py::object Batch::device() const {
  return py::reinterpret_steal<py::object>(THPDevice_New(parameters_.front()->local.device()));
}

namespace {

template <typename Value>
py::list list_of(c10::ArrayRef<Parameter*> parameters, const Value& value) {
  py::list values(parameters.size());
  for (size_t i = 0; i < parameters.size(); ++i) values[i] = value(*parameters[i]);
  return values;
}

}  // namespace

py::list Batch::params() const {
  return list_of(parameters_, [](const Parameter& of) { return wrapped(of.tensor); });
}

py::list Batch::groups() const {
  return list_of(parameters_, [](const Parameter& of) { return py::int_(of.group->position); });
}

bool Batch::asks() const {
  return std::any_of(parameters_.begin(), parameters_.end(), [this](const Parameter* parameter) {
    return asks_other_shards(*parameter, asks_);
  });
}

py::list Batch::asking() const {
  return list_of(parameters_, [this](const Parameter& of) -> py::object {
    if (!asks_other_shards(of, asks_)) return py::none();
    return py::make_tuple(sharding_of(of).number, of.group->max_grad_norm);
  });
}

Batch Batch::select(const std::vector<size_t>& places) const {
  std::vector<Parameter*> chosen;
  for (const size_t place : places) chosen.push_back(parameters_.at(place));
  return {collector_, snapshot_, chosen, asks_};
}

std::map<int64_t, Tensor> Batch::squares() const {
  const at::NoGradGuard no_grad;
  std::map<int64_t, std::vector<Tensor>> grads;
  for (const Parameter* parameter : parameters_) {
    grads[is_dtensor(*parameter) ? sharding_of(*parameter).number : 0].push_back(parameter->grad);
  }
  const py::gil_scoped_release no_gil;
  std::map<int64_t, Tensor> squares;
  for (const auto& [sharding, of] : grads) squares.emplace(sharding, adam_sum_of_squares(of));
  return squares;
}

Tensor Batch::squares_of_each() const {
  const at::NoGradGuard no_grad;
  const py::gil_scoped_release no_gil;
  std::vector<Tensor> squares;
  for (const Parameter* parameter : parameters_) {
    squares.push_back(adam_sum_of_squares(parameter->grad));
  }
  return at::stack(squares);
}

namespace {

// Whether more than this tensor has its memory. A prediction holds an object of Python for that of
// each fake tensor, which is on the meta device.
bool is_shared(const Tensor& grad) {
  const c10::Storage& storage = grad.storage();
  return storage.use_count() > (storage.device().is_meta() ? 2 : 1);
}

}  // namespace

void Batch::put_gradients() const {
  const bool in_backward = torch::autograd::get_current_graph_task_id() != -1;
  for (const Parameter* parameter : parameters_) {
    // A DTensor's gradient is there, and `grad` is the local part alone.
    if (is_dtensor(*parameter)) continue;
    Tensor& grad = parameter->tensor.mutable_grad();
    if (!grad.is_same(parameter->grad)) {
      grad = parameter->grad;  // DistributedDataParallel has reduced it elsewhere
    } else if (in_backward && is_shared(grad)) {
      // Backward goes on with that memory: of a view, as in `h + param.view(...)`.
      grad = grad.detach().clone();
    }
  }
}

void Batch::note_steps() const {
  for (const Parameter* parameter : parameters_) {
    checkpoint::note_step(parameter->local, parameter->position);
  }
}

void Batch::step(const py::object& scaling) const {
  const Scaling read = read_scaling(scaling);
  try {
    const py::gil_scoped_release no_gil;
    collector_->step(parameters_, read);
  } catch (...) {
    publish();  // those that were stepped before have their states
    throw;
  }
  publish();
}

void Batch::publish() const {
  if (collector_->backwards().current()) return;  // which publishes states at its end
  std::vector<FreshState> fresh;
  for (Parameter* parameter : parameters_) take_fresh(*parameter, fresh);
  const py::object optimizer = collector_->optimizer();
  if (!optimizer.is_none()) publish_states(fresh, optimizer);
}

}  // namespace memsave_ext::adam
