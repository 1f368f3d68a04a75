// The tensors of one batch_norm call: dense, of one layout, and as kernels are told of them.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/DeviceGuard.h>

#include "batch_norm/arguments.h"
#include "batch_norm/kernels.h"

namespace memsave_ext::batch_norm {

// Whether kernels can take them. Where not, the fallback of the operator says what is wrong
// (check() in memsave_ext/batch_norm/arguments.py).
bool can_take(const Arguments& of);

class Call {
 public:
  explicit Call(const Arguments& of);

  const Problem& problem() const { return problem_; }
  bool is_empty() const { return problem_.count() == 0 || problem_.channels == 0; }
  const Kernels& kernels() const;
  void* stream() const;

  at::Tensor empty() const;             // like the input
  at::Tensor empty_grad() const;        // like the input, with the strides of torch's gradient
  at::Tensor empty_channels() const;    // (C), in the statistics' type
  at::Tensor empty_statistics() const;  // (2, C)
  at::TensorOptions statistic_options() const;
  // In the layout of the others.
  at::Tensor dense(const at::Tensor& tensor) const { return tensor.contiguous(format_); }

 private:
  static const void* channel_vector(at::Tensor& keep, const at::Tensor& tensor,
                                    at::ScalarType type);

  c10::DeviceGuard device_;
  at::ScalarType statistic_type_;
  at::MemoryFormat format_;
  at::Tensor input_, residual_, weight_, bias_, workspace_;
  Problem problem_{};
};

}  // namespace memsave_ext::batch_norm
