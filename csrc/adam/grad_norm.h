// The norm of all gradients, and what clips them to it.
#pragma once

#include <ATen/core/Tensor.h>

#include <map>

#include "adam/step.h"

namespace memsave_ext::adam {

struct DeviceLess {
  bool operator()(c10::Device a, c10::Device b) const {
    return a.type() != b.type() ? a.type() < b.type() : a.index() < b.index();
  }
};

template <typename T>
using ByDevice = std::map<c10::Device, T, DeviceLess>;

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
  ByDevice<at::Tensor> squares_;
  at::Tensor norm_, factor_, skip_;
};

}  // namespace memsave_ext::adam
