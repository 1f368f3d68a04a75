// CheckpointFunction.apply(function, n, *args): the explicit form of checkpointing.
#pragma once

#include <Python.h>

namespace memsave_ext {

// Has the signature of a METH_FASTCALL function.
PyObject* checkpoint_apply(PyObject* self, PyObject* const* args, Py_ssize_t nargs);

}  // namespace memsave_ext
