// How the gradients of a step are scaled: by torch.amp.GradScaler's loss scale, and by norms.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/ArrayRef.h>
#include <pybind11/pybind11.h>

#include <map>
#include <optional>
#include <vector>

#include "adam/dtensor.h"
#include "adam/items.h"
#include "adam/parameter.h"
#include "streams.h"

namespace memsave_ext::adam {

struct DeviceLess {
  bool operator()(c10::Device a, c10::Device b) const {
    return a.type() != b.type() ? a.type() < b.type() : a.index() < b.index();
  }
};

template <typename T>
using ByDevice = std::map<c10::Device, T, DeviceLess>;

// Scalars that hooks accumulate into: one tensor for each stream. Only that stream makes, changes
// and frees it, so that no hook waits for another stream. combined() merges a device's tensors
// once, on the stream that reads them.
class PerStream {
 public:
  // Returns the tensor of the device's current stream; undefined at first.
  at::Tensor& here(c10::Device device) {
    const auto stream = current_stream(device);
    for (Part& part : parts_) {
      if (part.device == device && part.stream == stream) return part.tensor;
    }
    return parts_.emplace_back(Part{device, stream, {}}).tensor;
  }

  // Returns for each device all its tensors, merged by combine(a, b).
  template <typename Combine>
  ByDevice<at::Tensor> combined(const Combine& combine) const {
    ByDevice<at::Tensor> of_devices;
    for (const Part& part : parts_) {
      use_here(part.tensor, part.stream);
      at::Tensor& all = of_devices[part.device];
      all = all.defined() ? combine(all, part.tensor) : part.tensor;
    }
    return of_devices;
  }

  void clear() { parts_.clear(); }

 private:
  struct Part {
    c10::Device device;
    std::optional<c10::Stream> stream;
    at::Tensor tensor;
  };

  std::vector<Part> parts_;
};

// Returns the scale of the optimizer's GradScaler; undefined without one that is enabled.
// Needs the GIL.
at::Tensor read_grad_scale(const pybind11::handle& optimizer);

// found_inf: for each device a float scalar that is 1 where a gradient was not finite, else 0.
class FoundInf {
 public:
  // Returns the scalar that work on the current stream of `device` sets to 1 during this step.
  const at::Tensor& on(c10::Device device);
  // Ends the step: its scalars become of_last_step(). `of_norm` is the found_inf of all gradients
  // together; undefined where their norm is not measured.
  void end_step(const at::Tensor& of_norm);
  const std::vector<at::Tensor>& of_last_step() const { return last_; }

 private:
  PerStream now_;
  std::vector<at::Tensor> last_;
};

// The norm of all gradients together, and the factor that clips them to a maximum.
class GradNorm {
 public:
  // Adds the gradients of these parameters, all on one device.
  void add(c10::ArrayRef<Parameter*> parameters);

  // Computes norm(), found_inf() and the clipping factor; no gradients may be added after it.
  // `grad_scale` is undefined where the gradients are not multiples of one. `sharded` has one
  // DTensor of each sharding among the optimizer's parameters: the shards' sums are added up over
  // processes, in one collective for each, whether this process has added gradients or not.
  void finish(double max_norm, const at::Tensor& grad_scale, c10::ArrayRef<at::Tensor> sharded);

  // The norm of the gradients divided by their scale, before clipping: a float scalar, undefined
  // before finish().
  const at::Tensor& norm() const { return norm_; }
  // A float scalar, 1 where the norm is not finite; undefined without a scale.
  const at::Tensor& found_inf() const { return skip_; }
  // Returns the factor and the skip for gradients on this device. Called after finish().
  Scaling scaling(c10::Device device) const;

 private:
  at::Tensor sum_of(int64_t sharding) const;

  std::map<int64_t, PerStream> squares_;  // by number of the sharding
  at::Tensor norm_, factor_, skip_;
  std::optional<c10::Stream> made_on_;  // the stream on which these three were made
};

// Shards of DTensors must be scaled alike: clipped by the norm of all of them, or left out where
// any of them is not finite.

// Whether the parameter's own max_grad_norm, or a loss scale, asks for the whole gradient of which
// this process has a shard. `scaled`: there is a loss scale.
bool asks_other_shards(const Parameter& parameter, bool scaled);

// Returns the parameters that ask, those together that one agree() can be for, and the others last.
// It is the same in all processes where the parameters are.
std::vector<std::vector<Parameter*>> parts_that_agree(c10::ArrayRef<Parameter*> parameters,
                                                      bool scaled);

// Returns the factors and skips of the gradients of one such part: one collective.
Scaling agree(c10::ArrayRef<Parameter*> parameters, const Scaling& scaling);

}  // namespace memsave_ext::adam
