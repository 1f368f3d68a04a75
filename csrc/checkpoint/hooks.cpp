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

struct HolderObject {
  PyObject_HEAD Holder holder;
};

struct Packer {
  PyObject_HEAD vectorcallfunc vectorcall;
  Packing packing;
};

PyObject* stop = nullptr;
PyObject* unpack_hook = nullptr;

void dealloc_holder(PyObject* self) {
  reinterpret_cast<HolderObject*>(self)->holder.~Holder();
  Py_TYPE(self)->tp_free(self);
}

void dealloc_packer(PyObject* self) {
  reinterpret_cast<Packer*>(self)->packing.~Packing();
  Py_TYPE(self)->tp_free(self);
}

PyTypeObject holder_type = {PyVarObject_HEAD_INIT(nullptr, 0)};
PyTypeObject packer_type = {PyVarObject_HEAD_INIT(nullptr, 0)};

PyObject* pack(PyObject* self, PyObject* const* args, size_t, PyObject*) {
  HANDLE_TH_ERRORS
  const Packing& packing = reinterpret_cast<Packer*>(self)->packing;
  const at::Tensor& saved = THPVariable_Unpack(args[0]);
  if (packing.region) {
    return make_holder(Holder(packing.region, packing.region->save(saved))).release().ptr();
  }
  if (packing.run == nullptr) {
    Py_INCREF(args[0]);
    return args[0];
  }
  // Never with a graph: the value would keep the recompute's graph alive.
  const at::Tensor tensor = saved.requires_grad() ? detached(saved) : saved;
  if (!packing.run->save(tensor)) {
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
  return THPVariable_Wrap(reinterpret_cast<HolderObject*>(object)->holder.open());
  END_HANDLE_TH_ERRORS
}

PyMethodDef unpack_definition = {"unpack", unpack, METH_O, nullptr};

}  // namespace

void init_hooks() {
  holder_type.tp_name = "memsave_ext._C.Holder";
  holder_type.tp_basicsize = sizeof(HolderObject);
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

py::object make_holder(const Holder& holder) {
  auto* object = reinterpret_cast<HolderObject*>(holder_type.tp_alloc(&holder_type, 0));
  if (object == nullptr) throw py::error_already_set();
  new (&object->holder) Holder(holder);
  return py::reinterpret_steal<py::object>(reinterpret_cast<PyObject*>(object));
}

py::object make_packer(Packing packing) {
  auto* packer = reinterpret_cast<Packer*>(packer_type.tp_alloc(&packer_type, 0));
  if (packer == nullptr) throw py::error_already_set();
  packer->vectorcall = pack;
  new (&packer->packing) Packing(std::move(packing));
  return py::reinterpret_steal<py::object>(reinterpret_cast<PyObject*>(packer));
}

Packing* as_packing(PyObject* object) {
  return Py_TYPE(object) == &packer_type ? &reinterpret_cast<Packer*>(object)->packing : nullptr;
}

PyObject* unpack_function() { return unpack_hook; }

PyObject* stop_exception() { return stop; }

void throw_stop() {
  const py::gil_scoped_acquire gil;
  PyErr_SetNone(stop);
  throw_python_error();
}

HookGuard::HookGuard(py::object packer) : packer_(std::move(packer)) {
  const auto own = [](PyObject* object) {
    Py_INCREF(object);
    return c10::SafePyObject(object, getPyInterpreter());
  };
  at::SavedTensorDefaultHooks::push_hooks(own(packer_.ptr()), own(unpack_hook));
}

HookGuard::~HookGuard() {
  at::SavedTensorDefaultHooks::pop_hooks();
  *as_packing(packer_.ptr()) = {};
}

}  // namespace memsave_ext
