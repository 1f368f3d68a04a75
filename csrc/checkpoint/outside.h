// Tensors from outside of a region's function that it may read: which of them have changed between
// forward and recompute, and whether the recompute reads one that has.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/record_function.h>
#include <c10/core/Storage.h>
#include <pybind11/pybind11.h>

#include <optional>
#include <string>
#include <vector>

#include "checkpoint/saved.h"
#include "checkpoint/stepped.h"
#include "checkpoint/walk.h"

namespace memsave_ext {

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
  // After the forward: forgets the tensors that the forward itself has changed.
  void leave_out_own_changes(const std::vector<PyObject*>& roots);
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

}  // namespace memsave_ext
