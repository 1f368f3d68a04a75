#include "batch_norm/ops.h"

#include <ATen/ops/empty.h>

#include <array>
#include <optional>
#include <string_view>
#include <tuple>

#include "batch_norm/call.h"

namespace memsave_ext::batch_norm {
namespace {

using at::Tensor;

// A running buffer in the type that kernels compute in; written back where that is another.
class RunningBuffer {
 public:
  RunningBuffer(const MaybeTensor& buffer, const at::TensorOptions& options) {
    if (!given(buffer)) return;
    buffer_ = *buffer;
    computed_ = buffer_.to(options.dtype()).contiguous();
  }
  void* data() const { return computed_.defined() ? computed_.mutable_data_ptr() : nullptr; }
  void store() {
    if (computed_.defined() && !computed_.is_same(buffer_)) buffer_.copy_(computed_);
  }

 private:
  Tensor buffer_, computed_;
};

Tensor running_statistics(const Call& call, const MaybeTensor& running_mean,
                          const MaybeTensor& running_var, double eps) {
  TORCH_CHECK(given(running_mean) && given(running_var),
              "batch_norm: expected running_mean and running_var to be given when not training");
  Tensor statistics = call.empty_statistics();
  statistics[0].copy_(*running_mean);
  statistics[1].copy_(*running_var).add_(eps).rsqrt_();
  return statistics;
}

std::tuple<Tensor, Tensor> forward(const Tensor& input, const MaybeTensor& weight,
                                   const MaybeTensor& bias, const MaybeTensor& residual,
                                   const MaybeTensor& statistics, const MaybeTensor& running_mean,
                                   const MaybeTensor& running_var, bool training, double momentum,
                                   double eps, std::string_view activation, double negative_slope,
                                   std::optional<std::string_view> /*group*/) {
  const Call call(input, weight, bias, residual, activation, negative_slope);
  check_channels("running_mean", running_mean, input);
  check_channels("running_var", running_var, input);
  Tensor output;
  if (given(statistics) || !training) {
    const Tensor used = given(statistics)
                            ? statistics->clone()
                            : running_statistics(call, running_mean, running_var, eps);
    const void* values = call.check_statistics("statistics", used);
    output = call.empty();
    if (!call.is_empty()) {
      call.kernels().normalize(call.problem(), values, output.mutable_data_ptr(), call.stream());
    }
    return {output, used};
  }
  TORCH_CHECK_VALUE(call.problem().count() != 1,
                    "Expected more than 1 value per channel when training, got input size "
                    "torch.Size(",
                    input.sizes(), ")");
  output = call.empty();
  if (call.is_empty()) return {output, call.empty_statistics().zero_()};  // counts nothing
  const Tensor computed = call.empty_statistics();
  RunningBuffer mean(running_mean, call.statistic_options());
  RunningBuffer var(running_var, call.statistic_options());
  call.kernels().forward(call.problem(), eps, {mean.data(), var.data(), momentum},
                         computed.mutable_data_ptr(), output.mutable_data_ptr(), call.stream());
  mean.store();
  var.store();
  return {output, computed};
}

// An output that is wanted, or one that is empty.
struct Wanted {
  Wanted(bool wanted, const Call& call) : tensor(wanted ? call.empty_grad() : none(call)) {}
  static Tensor none(const Call& call) { return at::empty({0}, call.statistic_options()); }
  void* data() const { return tensor.numel() > 0 ? tensor.mutable_data_ptr() : nullptr; }
  Tensor tensor;
};

std::tuple<Tensor, Tensor, Tensor, Tensor> backward(
    const Tensor& grad, const Tensor& input, const MaybeTensor& weight, const MaybeTensor& bias,
    const MaybeTensor& residual, const Tensor& statistics, bool training, double /*eps*/,
    std::string_view activation, double negative_slope, std::array<bool, 4> mask) {
  const Call call(input, weight, bias, residual, activation, negative_slope);
  const void* values = call.check_statistics("statistics", statistics);
  const Tensor dense_grad = call.dense_grad(grad);
  const Wanted grad_input(mask[0], call);
  const Wanted grad_residual(mask[1], call);
  // Always both: they are by-products of the sums.
  const Tensor grad_weight = call.empty_channels();
  const Tensor grad_bias = call.empty_channels();
  if (call.is_empty()) {
    grad_weight.zero_();
    grad_bias.zero_();
  } else {
    call.kernels().backward(call.problem(), values, training, dense_grad.const_data_ptr(),
                            grad_input.data(), grad_residual.data(), grad_weight.mutable_data_ptr(),
                            grad_bias.mutable_data_ptr(), call.stream());
  }
  const auto as = [&](const Tensor& gradient, bool wanted, const MaybeTensor& of) {
    if (!wanted) return Wanted::none(call);
    return given(of) ? gradient.to(of->scalar_type()) : gradient;
  };
  return {grad_input.tensor, grad_residual.tensor, as(grad_weight, mask[2], weight),
          as(grad_bias, mask[3], bias)};
}

// mean (C), m2 (C), count: bytes, so that one collective carries real numbers and an integer.
Tensor moments(const Tensor& input) {
  const Call call(input);
  const int64_t size = 2 * call.problem().channels * call.statistic_options().dtype().itemsize();
  Tensor bytes = at::empty({size + 8}, input.options().dtype(at::kByte));
  bytes.narrow(0, size, 8).view(at::kLong).fill_(call.problem().count());
  if (call.is_empty()) {
    bytes.narrow(0, 0, size).zero_();
  } else {
    call.kernels().moments(call.problem(), bytes.mutable_data_ptr(), call.stream());
  }
  return bytes;
}

Tensor backward_sums(const Tensor& grad, const Tensor& input, const MaybeTensor& weight,
                     const MaybeTensor& bias, const MaybeTensor& residual, const Tensor& statistics,
                     std::string_view activation, double negative_slope) {
  const Call call(input, weight, bias, residual, activation, negative_slope);
  const void* values = call.check_statistics("statistics", statistics);
  const Tensor dense_grad = call.dense_grad(grad);
  if (call.is_empty()) return call.empty_statistics().zero_();
  Tensor sums = call.empty_statistics();
  call.kernels().backward_sums(call.problem(), values, dense_grad.const_data_ptr(),
                               sums.mutable_data_ptr(), call.stream());
  return sums;
}

std::tuple<Tensor, Tensor> backward_input(const Tensor& grad, const Tensor& input,
                                          const MaybeTensor& weight, const MaybeTensor& bias,
                                          const MaybeTensor& residual, const Tensor& statistics,
                                          const Tensor& means, std::string_view activation,
                                          double negative_slope, std::array<bool, 2> mask) {
  const Call call(input, weight, bias, residual, activation, negative_slope);
  const void* values = call.check_statistics("statistics", statistics);
  const void* mean_values = call.check_statistics("means", means);
  const Tensor dense_grad = call.dense_grad(grad);
  const Wanted grad_input(mask[0], call);
  const Wanted grad_residual(mask[1], call);
  if (!call.is_empty()) {
    call.kernels().backward_input(call.problem(), values, mean_values, dense_grad.const_data_ptr(),
                                  grad_input.data(), grad_residual.data(), call.stream());
  }
  return {grad_input.tensor, grad_residual.tensor};
}

}  // namespace

void register_operators(torch::Library& library) {
  library.impl("batch_norm_forward", forward);
  library.impl("batch_norm_backward", backward);
  library.impl("batch_norm_moments", moments);
  library.impl("batch_norm_backward_sums", backward_sums);
  library.impl("batch_norm_backward_input", backward_input);
}

}  // namespace memsave_ext::batch_norm

TORCH_LIBRARY_IMPL(memsave_ext, CPU, library) {
  memsave_ext::batch_norm::register_operators(library);
}
