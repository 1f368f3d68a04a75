// The norm of all gradients together, and the factor that clips them to a maximum.
#pragma once

#include <ATen/core/Tensor.h>

#include "adam/dtensor.h"
#include "adam/ops.h"
#include "adam/per_stream.h"

namespace memsave_ext::adam {

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
  at::Tensor sum_of(int64_t sharding) const;  // undefined where nothing was added

  std::map<int64_t, PerStream> squares_;  // by number of the sharding
  at::Tensor norm_, factor_, skip_;
  std::optional<c10::Stream> made_on_;  // the stream on which these three were made
};

}  // namespace memsave_ext::adam
