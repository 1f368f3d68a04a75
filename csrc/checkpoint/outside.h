// Tensors from outside of a region's function that it may read: which of them have changed between
// forward and recompute, and whether the recompute reads one that has.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/record_function.h>
#include <Python.h>
#include <c10/core/Storage.h>
#include <pybind11/pybind11.h>

#include <functional>
#include <optional>
#include <string>
#include <unordered_set>
#include <vector>

#include "checkpoint/stepped.h"
#include "checkpoint/tensors.h"

namespace memsave_ext::checkpoint {

// Visits, always in the same order, tensors in: tuples, lists, dicts and dataclasses, nested,
// unless they are very large; parameters, buffers and attributes of modules, but not buffers of
// torch's norms in training, which do not read them; what functions close over and the globals that
// they name, if these are tensors or modules; the objects that bound methods belong to; the parts
// of functools.partial. What holds tensors is visited once. Needs the GIL.
class TensorWalk {
 public:
  // Called with each tensor; name() then tells where it was found.
  using Visitor = std::function<void(PyObject* tensor)>;

  explicit TensorWalk(Visitor visitor) : visitor_(std::move(visitor)) {}

  void visit(PyObject* object, PyObject* key = nullptr, Py_ssize_t index = -1);
  // Where the tensor that is being visited was found: "linear.weight" or "mask[0]".
  std::string name() const;
  // Whether it is a module's buffer.
  bool is_buffer() const { return is_buffer_; }

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
  bool is_buffer_ = false;
  std::unordered_set<PyObject*> visited_;
  std::vector<Step> path_;
};

struct ChangedTensor {
  const c10::TensorImpl* tensor;    // set where it has no storage of its own
  const c10::StorageImpl* storage;  // set otherwise
  ByteRange range;
  std::string description;
};

class OutsideTensors {
 public:
  // All need the GIL. `roots` are the function and what it is called with.
  // Notes, before the forward, identity, storage and version of every tensor reached from `roots`.
  void note(const std::vector<PyObject*>& roots);
  // After the forward: forgets the tensors that the forward itself has changed, but for buffers,
  // which the recompute would find changed.
  void leave_out_changes_of_forward(const std::vector<PyObject*>& roots);
  // The tensors that are no longer as noted.
  std::vector<ChangedTensor> find_changed(const std::vector<PyObject*>& roots) const;

 private:
  struct Noted {
    const c10::TensorImpl* tensor;  // only compared, may be dangling
    WeakStorage storage;
    uint32_t version;
    bool changed_by_forward;

    static Noted of(const at::Tensor& tensor);
    bool is(const at::Tensor& tensor) const;
    bool is_as_it_was(const at::Tensor& tensor) const;
  };

  std::vector<Noted> noted_;
  bool same_places_ = true;  // whether the forward left every tensor where it was reached from
};

// A read, by one of the recompute's operators, of a tensor that had changed.
struct Read {
  std::string operator_name;
  std::string change;                // how it changed; empty where only a step is known
  std::optional<uint32_t> position;  // of the parameter in the optimizer that stepped it
  Metadata metadata;
};

// As memsave_ext/checkpoint/errors.py takes them. Needs the GIL.
pybind11::list as_list(const std::vector<Read>& reads);

// Notes, for a scope, operators of this thread that read tensors which have changed, or which an
// optimizer has stepped while `region`, which may be null, waited. Does nothing if there are none.
class ReadObserver {
 public:
  ReadObserver(std::vector<ChangedTensor> changed, const Pending* region);
  ~ReadObserver();
  ReadObserver(const ReadObserver&) = delete;
  ReadObserver& operator=(const ReadObserver&) = delete;

  const std::vector<Read>& reads() const { return reads_; }

 private:
  static std::unique_ptr<at::ObserverContext> on_operator(const at::RecordFunction& operator_);
  void look(const at::RecordFunction& operator_, size_t argument, const at::Tensor& tensor);

  std::vector<ChangedTensor> changed_;
  const Pending* region_;
  const bool active_;
  ReadObserver* outer_ = nullptr;
  at::CallbackHandle callback_ = 0;
  std::vector<Read> reads_;
};

}  // namespace memsave_ext::checkpoint
