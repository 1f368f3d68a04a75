// The tensors that a function can reach without being given them as arguments.
#pragma once

#include <Python.h>

#include <functional>
#include <string>
#include <unordered_set>
#include <vector>

namespace memsave_ext {

// Visits, always in the same order, tensors in: tuples, lists, dicts and dataclasses, nested, of up
// to 1000 elements; parameters and attributes of modules, but not buffers; what functions close
// over and the globals that they name, if these are tensors or modules; the objects that bound
// methods belong to; the parts of functools.partial. What holds tensors is visited once. Needs the
// GIL.
class TensorWalk {
 public:
  // Called with each tensor; name() then tells where it was found.
  using Visitor = std::function<void(PyObject* tensor)>;

  explicit TensorWalk(Visitor visitor) : visitor_(std::move(visitor)) {}

  void visit(PyObject* object, PyObject* key = nullptr, Py_ssize_t index = -1);
  // Where the tensor that is being visited was found: "linear.weight" or "mask[0]".
  std::string name() const;

 private:
  // How a value was reached: by a name, or by a position.
  struct Step {
    PyObject* key;
    Py_ssize_t index;
  };

  void visit_inside(PyObject* object);
  void visit_sequence(PyObject* object);
  void visit_dict(PyObject* dict);
  void visit_module(PyObject* module);
  void visit_function(PyObject* function);

  Visitor visitor_;
  std::unordered_set<PyObject*> visited_;
  std::vector<Step> path_;
};

}  // namespace memsave_ext
