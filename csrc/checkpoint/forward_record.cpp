#include "checkpoint/forward_record.h"

#include <ATen/SavedTensorHooks.h>
#include <torch/csrc/PyInterpreter.h>
#include <torch/csrc/autograd/graph_task.h>

#include <vector>

namespace memsave_ext::checkpoint {

namespace py = pybind11;

namespace {
thread_local std::vector<ForwardRecordScope*> scopes;
}

ForwardRecord::~ForwardRecord() {
  if (dict_ == nullptr || !Py_IsInitialized()) return;
  const py::gil_scoped_acquire gil;
  Py_DECREF(dict_);
}

py::object ForwardRecord::dict() {
  if (dict_ == nullptr) dict_ = py::dict().release().ptr();
  return py::reinterpret_borrow<py::object>(dict_);
}

ForwardRecordScope::ForwardRecordScope(ForwardRecord& record, Kind kind)
    : forward_record_(record),
      kind_(kind),
      graph_task_(torch::autograd::get_current_graph_task_id()) {
  scopes.push_back(this);
}

ForwardRecordScope::~ForwardRecordScope() { scopes.pop_back(); }

py::tuple forward_record_scopes() {
  py::tuple result(scopes.size());
  for (size_t i = 0; i < scopes.size(); ++i) {
    ForwardRecordScope& scope = *scopes[i];
    py::object positions = py::none();
    if (scope.kind_ == ForwardRecordScope::kReplaying) {
      if (!scope.positions_) scope.positions_ = py::dict();
      positions = scope.positions_;
    }
    result[i] = py::make_tuple(scope.forward_record_.dict(), positions, scope.graph_task_);
  }
  return result;
}

py::tuple pack_hooks() {
  if (!at::SavedTensorDefaultHooks::is_enabled()) return py::tuple(0);
  auto stack = at::SavedTensorDefaultHooks::get_tls_state().stack;  // a copy, to be emptied
  py::tuple result(stack.size());
  for (size_t i = stack.size(); i-- > 0; stack.pop()) {
    result[i] = py::reinterpret_borrow<py::object>(stack.top().first.ptr(getPyInterpreter()));
  }
  return result;
}

}  // namespace memsave_ext::checkpoint
