// torch.amp.GradScaler: the scale of gradients, and found_inf of each device.
#pragma once

#include <ATen/core/Tensor.h>
#include <pybind11/pybind11.h>

#include <vector>

#include "adam/per_stream.h"

namespace memsave_ext::adam {

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

}  // namespace memsave_ext::adam
