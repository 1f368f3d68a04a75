// The tensors of one batch_norm call: checked, dense, of one layout, and as kernels are told of
// them.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/DeviceGuard.h>

#include <optional>
#include <string_view>

#include "batch_norm/kernels.h"

namespace memsave_ext::batch_norm {

using MaybeTensor = std::optional<at::Tensor>;

inline bool given(const MaybeTensor& tensor) { return tensor.has_value() && tensor->defined(); }

Activation parse_activation(std::string_view name);

// A vector of the input's channels, in any floating-point type.
void check_channels(const char* name, const MaybeTensor& tensor, const at::Tensor& input);

class Call {
 public:
  explicit Call(const at::Tensor& input, const MaybeTensor& weight = {},
                const MaybeTensor& bias = {}, const MaybeTensor& residual = {},
                std::string_view activation = "none", double negative_slope = 0);

  const Problem& problem() const { return problem_; }
  bool is_empty() const { return problem_.count() == 0; }
  const Kernels& kernels() const;
  void* stream() const;

  at::Tensor empty() const;             // like the input
  at::Tensor empty_grad() const;        // like the input, with the strides of torch's gradient
  at::Tensor empty_channels() const;    // (C), in the statistics' type
  at::Tensor empty_statistics() const;  // (2, C)
  at::TensorOptions statistic_options() const;
  // The address of a tensor made by empty_statistics().
  const void* check_statistics(const char* name, const at::Tensor& tensor) const;
  // A gradient of the output, in the layout of the others.
  at::Tensor dense_grad(const at::Tensor& grad) const;

 private:
  at::Tensor dense(const at::Tensor& tensor) const { return tensor.contiguous(format_); }
  const void* channel_vector(at::Tensor& keep, const MaybeTensor& tensor) const;

  c10::DeviceGuard device_;
  at::ScalarType statistic_type_;
  at::MemoryFormat format_;
  at::Tensor input_, residual_, weight_, bias_, workspace_;
  Problem problem_{};
};

}  // namespace memsave_ext::batch_norm
