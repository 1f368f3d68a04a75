// torch.amp.GradScaler: what the loss was multiplied by, and where gradients were not finite.
#pragma once

#include <ATen/core/Tensor.h>
#include <pybind11/pybind11.h>

#include <vector>

#include "adam/per_stream.h"

namespace memsave_ext::adam {

// The scale of the optimizer's GradScaler; undefined without one. Needs the GIL.
at::Tensor read_loss_scale(const pybind11::handle& optimizer);

// For each device a float scalar, 1 where a gradient was not finite.
class FoundInf {
 public:
  // Of the step that is being made, for what the current stream does next.
  const at::Tensor& on(c10::Device device);
  // `of_norm`: of all gradients; undefined where their norm is not measured.
  void end_step(const at::Tensor& of_norm);
  const std::vector<at::Tensor>& of_last_step() const { return last_; }

 private:
  PerStream now_;
  std::vector<at::Tensor> last_;
};

}  // namespace memsave_ext::adam
