// The tensors of one batch_norm call, dense and in one layout, and the Problem that describes them.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/DeviceGuard.h>

#include "batch_norm/arguments.h"
#include "batch_norm/kernels.h"

namespace memsave_ext::batch_norm {

// Whether the kernels can take these arguments. If not, the operator's fallback says what is wrong
// with them (check() in memsave_ext/batch_norm/arguments.py).
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
  // Returns `tensor` in the layout of the call.
  at::Tensor dense(const at::Tensor& tensor) const { return tensor.contiguous(format_); }

 private:
  // Returns the address of a dense copy of type `type`, which `keep` then holds (`tensor` itself
  // where it is one already). Null for an undefined tensor.
  static const void* channel_vector(at::Tensor& keep, const at::Tensor& tensor,
                                    at::ScalarType type);

  c10::DeviceGuard device_;
  at::ScalarType statistic_type_;
  at::MemoryFormat format_;
  at::Tensor input_, residual_, weight_, bias_, workspace_;
  Problem problem_{};
};

}  // namespace memsave_ext::batch_norm
