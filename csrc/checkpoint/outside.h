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
#include <unordered_map>
#include <vector>

#include "checkpoint/rng.h"
#include "checkpoint/stepped.h"
#include "checkpoint/tensors.h"

namespace memsave_ext::checkpoint {

// Calls `use` with each tensor in what a function has returned: itself, or those in dicts, tuples,
// lists, sets, dataclasses and SimpleNamespace, nested, each of which is looked into once. Needs
// the GIL.
void for_each_tensor(PyObject* output, const std::function<void(PyObject*)>& use);

// Visits, always in the same order, tensors and generators in: tuples, lists, dicts, dataclasses
// and SimpleNamespace, nested, unless they are very large; parameters, buffers and attributes of
// modules, but not buffers of torch's norms in training, which do not read them; what functions and
// modules' forward close over, have as defaults, and name as globals, other functions of their file
// among them; the objects that bound methods belong to; the parts of functools.partial. What holds
// tensors is visited once. Needs the GIL.
class TensorWalk {
 public:
  // Called with each tensor; name() then tells where it was found.
  using Visitor = std::function<void(PyObject* tensor)>;
  // Called with what a name of a function stands for, the name's place, and where the object was
  // visited first. Where the name was another object before, returns where that one was visited
  // first: what the new one holds is visited as if it were there, whether or not it was already.
  using NameVisitor =
      std::function<std::optional<size_t>(PyObject* object, size_t place, size_t first)>;

  // `generators`: to which those that are visited are added; null for none.
  TensorWalk(Visitor visitor, NameVisitor names, std::vector<at::Generator>* generators = nullptr)
      : visitor_(std::move(visitor)), names_(std::move(names)), generators_(generators) {}

  void visit(PyObject* object, PyObject* key = nullptr, Py_ssize_t index = -1,
             std::optional<size_t> place = std::nullopt);
  // Where the tensor that is being visited was found: "linear.weight" or "mask[0]".
  std::string name() const;
  // A hash of the way to it: where a later walk finds a tensor by the same way, it is the same.
  size_t place() const { return path_.back().place; }
  // Whether it is a module's buffer.
  bool is_buffer() const { return is_buffer_; }
  // Whether a name that leads to it was another object before.
  bool is_of_another() const { return of_another_ > 0; }

 private:
  // How a value was reached: by a name, or by a position.
  struct Step {
    PyObject* key;
    Py_ssize_t index;
    size_t place;
  };

  void visit_inside(PyObject* object);
  void visit_sequence(PyObject* object);
  void visit_dict(PyObject* dict);
  void visit_module(PyObject* module);
  void visit_function(PyObject* function);
  void visit_globals(PyCodeObject* code, PyObject* globals);
  void visit_values(PyObject* dict);
  // `code`: what may read a global of this name; null for a variable of the function around it.
  void visit_named(PyObject* object, PyObject* name, PyCodeObject* code);

  Visitor visitor_;
  NameVisitor names_;
  std::vector<at::Generator>* const generators_;
  size_t place_inside(PyObject* key, Py_ssize_t index);

  bool is_buffer_ = false;
  int of_another_ = 0;
  size_t roots_ = 0;
  std::unordered_map<PyObject*, size_t> visited_;  // with their places
  std::vector<Step> path_;
};

struct ChangedTensor {
  const c10::TensorImpl* tensor;
  // None where it has none of its own. A recompute may put another tensor in this one's place,
  // which frees it: the weak reference keeps its address from being used again.
  WeakStorage storage;
  ByteRange range;
  std::string description;
  bool has_same_values;  // only whether it needs a gradient has changed
  // Where it is another view of the memory that the forward had there, which may be read by right
  // through others: then what lies there as it does is this one.
  std::optional<size_t> layout;
};

class OutsideTensors {
 public:
  // All need the GIL. `roots` are the function and what it is called with.
  // Notes, before the forward, identity, storage and version of every tensor reached from `roots`,
  // and returns the generators that are reached.
  std::vector<at::Generator> note(const std::vector<PyObject*>& roots);
  // After the forward: notes the tensors as they are now, and which of them the forward itself has
  // changed. These are left out, but for buffers, which the recompute would find changed.
  void leave_out_changes_of_forward(const std::vector<PyObject*>& roots);
  struct Changes {
    std::vector<ChangedTensor> tensors;     // no longer as noted
    std::vector<at::Generator> generators;  // all that are reached
  };
  // Before a recompute.
  Changes find_changed(const std::vector<PyObject*>& roots) const;
  // Whether it was there before the forward, which has left it as it was.
  bool has(const at::Tensor& tensor) const;
  // Those that the noted tensors are on.
  const CudaDevices& devices() const { return devices_; }

 private:
  struct Noted {
    const c10::TensorImpl* tensor;  // only compared, may be dangling
    WeakStorage storage;
    size_t layout;
    uint32_t version;
    bool requires_grad;
    size_t place;
    bool changed_by_forward;  // and not made by it, where there was none

    static Noted of(const at::Tensor& tensor, size_t place);
    bool is(const at::Tensor& tensor) const;
    bool is_as_it_was(const at::Tensor& tensor) const;
  };
  // Finds what was noted at places, which a walk visits in the order in which they were noted, but
  // for what has come or gone in between.
  class Cursor {
   public:
    explicit Cursor(const std::vector<Noted>& noted) : noted_(noted) {}
    const Noted* at(size_t place);

   private:
    const std::vector<Noted>& noted_;
    size_t next_ = 0;
  };

  // What a name of a function stood for, and where that was visited first.
  struct Name {
    size_t place;
    PyObject* object;  // only compared, may be gone
    size_t first;
  };

  // Notes the names of a walk, in place of those of an earlier one.
  TensorWalk::NameVisitor note_names();
  // What was noted of a tensor, at the place where it is or at another one.
  const Noted* find(const at::Tensor& tensor, const Noted* there) const;

  std::vector<Noted> noted_;
  std::vector<Name> names_;
  CudaDevices devices_;
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
