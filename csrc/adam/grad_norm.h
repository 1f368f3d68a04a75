// The norm of all gradients, and what clips them to it.
#pragma once

#include <ATen/core/Tensor.h>

#include "adam/per_stream.h"
#include "adam/step.h"

namespace memsave_ext::adam {

class GradNorm {
 public:
  // Gradients on one device.
  void add(c10::ArrayRef<at::Tensor> grads);

  // No more are added. `loss_scale` and `found` as in Scaling, each undefined without.
  void finish(double max_norm, const at::Tensor& loss_scale);

  // A float scalar, of the gradients over the scale, before clipping; undefined before finish().
  const at::Tensor& norm() const { return norm_; }
  // 1 where it is not finite; undefined without a scale.
  const at::Tensor& found() const { return skip_; }
  // For gradients on this device.
  Scaling scaling(c10::Device device) const;

 private:
  PerStream squares_;
  at::Tensor norm_, factor_, skip_;
  std::optional<c10::Stream> made_on_;  // these three
};

}  // namespace memsave_ext::adam
