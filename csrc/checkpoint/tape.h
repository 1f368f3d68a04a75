// What modules inside a region keep from its forward for its recomputes: a Python dict, which
// belongs to memsave_ext/checkpointing/tapes.py and is only carried here.
#pragma once

#include <pybind11/pybind11.h>

#include <utility>

namespace memsave_ext {

// Owned by a region. May be freed without the GIL.
class Tape {
 public:
  Tape() = default;
  Tape(Tape&& other) noexcept : dict_(std::exchange(other.dict_, nullptr)) {}
  Tape& operator=(Tape&&) = delete;
  ~Tape();

  pybind11::object dict();  // made by the first call

 private:
  PyObject* dict_ = nullptr;
};

// A region whose function this thread runs. Made and left with the GIL held.
class TapeScope {
 public:
  enum Kind { kRecording, kReplaying };

  TapeScope(Tape& tape, Kind kind);
  ~TapeScope();
  TapeScope(const TapeScope&) = delete;
  TapeScope& operator=(const TapeScope&) = delete;

 private:
  friend pybind11::tuple tape_scopes();

  Tape& tape_;
  Kind kind_;
  int64_t graph_task_;
  pybind11::object positions_;
};

// For each scope of this thread, outermost first: (tape, positions, graph task). Positions are a
// dict that lives as long as one recompute, and None in a forward.
pybind11::tuple tape_scopes();

// The pack hooks of this thread's torch.autograd.graph.saved_tensors_hooks, outermost first.
pybind11::tuple pack_hooks();

}  // namespace memsave_ext
