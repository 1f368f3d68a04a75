#include "checkpoint/hooks.h"

#include <c10/core/SafePyObject.h>
#include <structmember.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/PyInterpreter.h>
#include <torch/csrc/autograd/python_variable.h>

#include <new>

#include "checkpoint/call.h"
#include "checkpoint/recompute.h"

namespace memsave_ext {

namespace py = pybind11;

namespace {

struct SavedObject {
  PyObject_HEAD std::shared_ptr<Saved> saved;
};

struct Hook {
  PyObject_HEAD vectorcallfunc vectorcall;
  std::shared_ptr<Packer> packer;  // null once its scope has ended
};

PyObject* stop = nullptr;
PyObject* unpack_hook = nullptr;

void dealloc_saved(PyObject* self) {
  reinterpret_cast<SavedObject*>(self)->saved.~shared_ptr();
  Py_TYPE(self)->tp_free(self);
}

void dealloc_hook(PyObject* self) {
  reinterpret_cast<Hook*>(self)->packer.~shared_ptr();
  Py_TYPE(self)->tp_free(self);
}

PyTypeObject saved_type = {PyVarObject_HEAD_INIT(nullptr, 0)};
PyTypeObject hook_type = {PyVarObject_HEAD_INIT(nullptr, 0)};

PyObject* pack(PyObject* self, PyObject* const* args, size_t, PyObject*) {
  HANDLE_TH_ERRORS
  const std::shared_ptr<Packer> packer = packer_of(self);
  at::Tensor tensor = THPVariable_Unpack(args[0]);
  if (packer) {
    if (auto saved = packer->pack(tensor)) return wrap_saved(std::move(saved)).release().ptr();
  }
  return THPVariable_Wrap(tensor);
  END_HANDLE_TH_ERRORS
}

PyObject* unpack(PyObject*, PyObject* object) {
  HANDLE_TH_ERRORS
  if (Py_TYPE(object) != &saved_type) {  // kept as it is
    Py_INCREF(object);
    return object;
  }
  const std::shared_ptr<Saved> saved = reinterpret_cast<SavedObject*>(object)->saved;
  return THPVariable_Wrap(saved->open());
  END_HANDLE_TH_ERRORS
}

PyMethodDef unpack_definition = {"unpack", unpack, METH_O, nullptr};

}  // namespace

void init_hooks() {
  saved_type.tp_name = "memsave_ext._C.Saved";
  saved_type.tp_basicsize = sizeof(SavedObject);
  saved_type.tp_flags = Py_TPFLAGS_DEFAULT;
  saved_type.tp_dealloc = dealloc_saved;
  hook_type.tp_name = "memsave_ext._C.PackHook";
  hook_type.tp_basicsize = sizeof(Hook);
  hook_type.tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_VECTORCALL;
  hook_type.tp_dealloc = dealloc_hook;
  hook_type.tp_vectorcall_offset = offsetof(Hook, vectorcall);
  hook_type.tp_call = PyVectorcall_Call;
  if (PyType_Ready(&saved_type) < 0 || PyType_Ready(&hook_type) < 0) {
    throw py::error_already_set();
  }
  // Not an Exception: the function's own handlers are not meant for it.
  stop = PyErr_NewException("memsave_ext._C.StopRecompute", PyExc_BaseException, nullptr);
  unpack_hook = PyCFunction_New(&unpack_definition, nullptr);
  if (stop == nullptr || unpack_hook == nullptr) throw py::error_already_set();
  at::SavedTensorDefaultHooks::lazy_initialize();
}

py::object wrap_saved(std::shared_ptr<Saved> saved) {
  auto* object = reinterpret_cast<SavedObject*>(saved_type.tp_alloc(&saved_type, 0));
  if (object == nullptr) throw py::error_already_set();
  new (&object->saved) std::shared_ptr<Saved>(std::move(saved));
  return py::reinterpret_steal<py::object>(reinterpret_cast<PyObject*>(object));
}

std::shared_ptr<Packer> packer_of(PyObject* hook) {
  // Atomically: another thread may leave the hook's scope meanwhile.
  return Py_TYPE(hook) == &hook_type ? std::atomic_load(&reinterpret_cast<Hook*>(hook)->packer)
                                     : nullptr;
}

PyObject* unpack_function() { return unpack_hook; }

PyObject* stop_exception() { return stop; }

void throw_stop() {
  const py::gil_scoped_acquire gil;
  PyErr_SetNone(stop);
  throw_python_error();
}

HookGuard::HookGuard(std::shared_ptr<Packer> packer) {
  auto* hook = reinterpret_cast<Hook*>(hook_type.tp_alloc(&hook_type, 0));
  if (hook == nullptr) throw py::error_already_set();
  hook->vectorcall = pack;
  new (&hook->packer) std::shared_ptr<Packer>(std::move(packer));
  hook_ = py::reinterpret_steal<py::object>(reinterpret_cast<PyObject*>(hook));
  const auto own = [](PyObject* object) {
    Py_INCREF(object);
    return c10::SafePyObject(object, getPyInterpreter());
  };
  at::SavedTensorDefaultHooks::push_hooks(own(hook_.ptr()), own(unpack_hook));
}

HookGuard::~HookGuard() {
  at::SavedTensorDefaultHooks::pop_hooks();
  std::atomic_store(&reinterpret_cast<Hook*>(hook_.ptr())->packer, std::shared_ptr<Packer>());
}

}  // namespace memsave_ext
