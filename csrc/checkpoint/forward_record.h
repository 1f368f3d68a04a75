// What modules inside a region keep from its forward for its recomputes: a Python dict, which
// belongs to memsave_ext/checkpoint/forward_records.py and is only carried here.
#pragma once

#include <pybind11/pybind11.h>

#include <utility>

namespace memsave_ext::checkpoint {

// Owned by a region. May be freed without the GIL.
class ForwardRecord {
 public:
  ForwardRecord() = default;
  ForwardRecord(ForwardRecord&& other) noexcept : dict_(std::exchange(other.dict_, nullptr)) {}
  ForwardRecord& operator=(ForwardRecord&&) = delete;
  ~ForwardRecord();

  pybind11::object dict();  // made by the first call

 private:
  PyObject* dict_ = nullptr;
};

// A region whose function this thread runs. Made and left with the GIL held.
class ForwardRecordScope {
 public:
  enum Kind { kRecording, kReplaying };

  ForwardRecordScope(ForwardRecord& record, Kind kind);
  ~ForwardRecordScope();
  ForwardRecordScope(const ForwardRecordScope&) = delete;
  ForwardRecordScope& operator=(const ForwardRecordScope&) = delete;

 private:
  friend pybind11::tuple forward_record_scopes();

  ForwardRecord& forward_record_;
  Kind kind_;
  int64_t graph_task_;
  pybind11::object positions_;
};

// For each scope of this thread, outermost first: (record, positions, graph task). Positions are a
// dict that lives as long as one recompute, and None in a forward.
pybind11::tuple forward_record_scopes();

// The pack hooks of this thread's torch.autograd.graph.saved_tensors_hooks, outermost first.
pybind11::tuple pack_hooks();

}  // namespace memsave_ext::checkpoint
