#include "checkpoint/hooks.h"

#include <c10/core/SafePyObject.h>
#include <structmember.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/PyInterpreter.h>
#include <torch/csrc/autograd/python_variable.h>

#include <new>

#include "checkpoint/region.h"

namespace memsave_ext {

namespace py = pybind11;

namespace {

struct Holder {
  PyObject_HEAD std::shared_ptr<Region> region;
  size_t index;
};

// region is set for a forward, run for a recompute, neither when the hook's scope has ended.
struct Packer {
  PyObject_HEAD vectorcallfunc vectorcall;
  std::shared_ptr<Region> region;
  Recompute* run;
};

PyObject* stop = nullptr;
PyObject* unpack_hook = nullptr;

void dealloc_holder(PyObject* self) {
  auto* holder = reinterpret_cast<Holder*>(self);
  holder->region->holder_died(holder->index);
  holder->region.~shared_ptr();
  Py_TYPE(self)->tp_free(self);
}

void dealloc_packer(PyObject* self) {
  reinterpret_cast<Packer*>(self)->region.~shared_ptr();
  Py_TYPE(self)->tp_free(self);
}

PyTypeObject holder_type = {PyVarObject_HEAD_INIT(nullptr, 0)};
PyTypeObject packer_type = {PyVarObject_HEAD_INIT(nullptr, 0)};

PyObject* pack(PyObject* self, PyObject* const* args, size_t, PyObject*) {
  HANDLE_TH_ERRORS
  auto* packer = reinterpret_cast<Packer*>(self);
  const at::Tensor& saved = THPVariable_Unpack(args[0]);
  if (packer->region) return packer->region->save(saved).release().ptr();
  if (packer->run == nullptr) {  // out of its scope
    Py_INCREF(args[0]);
    return args[0];
  }
  // Never with a graph: the value would keep the recompute's graph alive.
  const at::Tensor tensor = saved.requires_grad() ? saved.detach() : saved;
  if (!packer->run->save(tensor)) {
    PyErr_SetNone(stop);
    return nullptr;
  }
  return THPVariable_Wrap(tensor);
  END_HANDLE_TH_ERRORS
}

PyObject* unpack(PyObject*, PyObject* object) {
  HANDLE_TH_ERRORS
  if (Py_TYPE(object) != &holder_type) {  // saved by a recompute, as it is
    Py_INCREF(object);
    return object;
  }
  auto* holder = reinterpret_cast<Holder*>(object);
  return THPVariable_Wrap(holder->region->open(holder->index));
  END_HANDLE_TH_ERRORS
}

PyMethodDef unpack_definition = {"unpack", unpack, METH_O, nullptr};

Packer* new_packer() {
  auto* packer = reinterpret_cast<Packer*>(packer_type.tp_alloc(&packer_type, 0));
  if (packer == nullptr) throw py::error_already_set();
  packer->vectorcall = pack;
  new (&packer->region) std::shared_ptr<Region>();
  packer->run = nullptr;
  return packer;
}

}  // namespace

void init_hooks() {
  holder_type.tp_name = "memsave_ext._C.Holder";
  holder_type.tp_basicsize = sizeof(Holder);
  holder_type.tp_flags = Py_TPFLAGS_DEFAULT;
  holder_type.tp_dealloc = dealloc_holder;
  packer_type.tp_name = "memsave_ext._C.Packer";
  packer_type.tp_basicsize = sizeof(Packer);
  packer_type.tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_VECTORCALL;
  packer_type.tp_dealloc = dealloc_packer;
  packer_type.tp_vectorcall_offset = offsetof(Packer, vectorcall);
  packer_type.tp_call = PyVectorcall_Call;
  if (PyType_Ready(&holder_type) < 0 || PyType_Ready(&packer_type) < 0) {
    throw py::error_already_set();
  }
  // Not an Exception: the function's own handlers are not meant for it.
  stop = PyErr_NewException("memsave_ext._C.StopRecompute", PyExc_BaseException, nullptr);
  unpack_hook = PyCFunction_New(&unpack_definition, nullptr);
  if (stop == nullptr || unpack_hook == nullptr) throw py::error_already_set();
  at::SavedTensorDefaultHooks::lazy_initialize();
}

py::object make_holder(std::shared_ptr<Region> region, size_t index) {
  auto* holder = reinterpret_cast<Holder*>(holder_type.tp_alloc(&holder_type, 0));
  if (holder == nullptr) throw py::error_already_set();
  new (&holder->region) std::shared_ptr<Region>(std::move(region));
  holder->index = index;
  return py::reinterpret_steal<py::object>(reinterpret_cast<PyObject*>(holder));
}

py::object make_packer(std::shared_ptr<Region> region) {
  Packer* packer = new_packer();
  packer->region = std::move(region);
  return py::reinterpret_steal<py::object>(reinterpret_cast<PyObject*>(packer));
}

py::object make_packer(Recompute& run) {
  Packer* packer = new_packer();
  packer->run = &run;
  return py::reinterpret_steal<py::object>(reinterpret_cast<PyObject*>(packer));
}

PyObject* stop_exception() { return stop; }

HookGuard::HookGuard(py::object packer) : packer_(std::move(packer)) {
  const auto own = [](PyObject* object) {
    Py_INCREF(object);
    return c10::SafePyObject(object, getPyInterpreter());
  };
  at::SavedTensorDefaultHooks::push_hooks(own(packer_.ptr()), own(unpack_hook));
}

HookGuard::~HookGuard() {
  at::SavedTensorDefaultHooks::pop_hooks();
  auto* packer = reinterpret_cast<Packer*>(packer_.ptr());
  packer->region.reset();
  packer->run = nullptr;
}

}  // namespace memsave_ext
