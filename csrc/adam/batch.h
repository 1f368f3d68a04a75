// Parameters on one device with the gradients that a step is made with, as Python sees them.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/ArrayRef.h>
#include <pybind11/pybind11.h>

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "adam/items.h"
#include "adam/parameter.h"

namespace memsave_ext::adam {

class Collector;
struct Snapshot;

struct DeviceLess {
  bool operator()(c10::Device a, c10::Device b) const {
    return a.type() != b.type() ? a.type() < b.type() : a.index() < b.index();
  }
};

template <typename T>
using ByDevice = std::map<c10::Device, T, DeviceLess>;

// Which shards of DTensors must be scaled by what other processes have: by the norm of all of them,
// or by whether any is not finite.
enum class Asks { kNever, kClipped, kAlways };  // kClipped: those with a max_grad_norm
inline constexpr const char* kAsks[] = {"never", "clipped", "always"};

// Whether stepping the prepared parameter takes a collective of the processes with other shards.
bool asks_other_shards(const Parameter& parameter, Asks asks);

// Reads a `Scaling` of memsave_ext/adam/norms.py, or None.
Scaling read_scaling(const pybind11::handle& scaling);

class Batch {
 public:
  Batch(std::shared_ptr<Collector> collector, std::shared_ptr<Snapshot> snapshot,
        c10::ArrayRef<Parameter*> parameters, Asks asks)
      : collector_(std::move(collector)),
        snapshot_(std::move(snapshot)),
        parameters_(parameters.vec()),
        asks_(asks) {}

  size_t size() const { return parameters_.size(); }
  pybind11::object device() const;
  pybind11::list params() const;  // as they are in param_groups
  pybind11::list groups() const;  // the numbers of their groups
  bool asks() const;              // whether any parameter asks for other shards
  // For each parameter None, or where it asks: what those that ask together have in common.
  pybind11::list asking() const;
  Batch select(const std::vector<size_t>& places) const;
  // Returns the sum of squares of the gradients by number of their sharding; 0: they are whole.
  std::map<int64_t, at::Tensor> squares() const;
  at::Tensor squares_of_each() const;
  // Puts gradients into .grad, where an optimizer's own step() looks for them, and from where it
  // may change them.
  void put_gradients() const;
  // Tells recomputes that the parameters have changed.
  void note_steps() const;
  // Steps. Puts new states into the optimizer's.
  void step(const pybind11::object& scaling) const;

  c10::ArrayRef<Parameter*> parameters() const { return parameters_; }

 private:
  void publish() const;

  std::shared_ptr<Collector> collector_;
  std::shared_ptr<Snapshot> snapshot_;  // owns the parameters
  std::vector<Parameter*> parameters_;
  Asks asks_;
};

}  // namespace memsave_ext::adam
