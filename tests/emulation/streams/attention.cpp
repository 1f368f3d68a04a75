// Attention on the device: torch's composite asks the device which kernel it has, and calls that.
// Kernels of either kind compute as a CPU's does, without dropout, and return what a card's return.
#include <ATen/Functions.h>
#include <ATen/native/transformers/attention.h>
#include <torch/library.h>

#include <array>
#include <atomic>
#include <optional>
#include <tuple>

#include "device.h"

namespace emulated {

using at::Tensor;
using Mask = std::optional<Tensor>;

std::atomic<int64_t> chosen_attention = static_cast<int64_t>(at::SDPBackend::math);

namespace {

int64_t choose(const Tensor&, const Tensor&, const Tensor&, const Mask&, double, bool,
               std::optional<double>, bool) {
  return chosen_attention;
}

std::tuple<Tensor, Tensor, Tensor, Tensor> efficient(const Tensor& query, const Tensor& key,
                                                     const Tensor& value, const Mask& mask,
                                                     bool keeps_sums, double, bool is_causal,
                                                     std::optional<double> scale) {
  constexpr int64_t kMultiple = 32;
  const auto [out, sums] = at::_scaled_dot_product_flash_attention_for_cpu(query, key, value, 0.0,
                                                                           is_causal, mask, scale);
  const int64_t rows = query.size(2);
  const int64_t kept = keeps_sums ? (rows + kMultiple - 1) / kMultiple * kMultiple : 0;
  const Tensor made = at::empty({query.size(0), query.size(1), kept}, sums.options());
  if (kept > 0) made.narrow(2, 0, rows).copy_(sums);
  const auto number = query.options().dtype(at::kLong);
  return {out, made, at::empty({}, number), at::empty({}, number)};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> efficient_backward(
    const Tensor& gradient, const Tensor& query, const Tensor& key, const Tensor& value,
    const Tensor& mask, const Tensor& out, const Tensor& sums, const Tensor&, const Tensor&, double,
    std::array<bool, 4>, bool is_causal, std::optional<double> scale) {
  const auto [q, k, v] = at::_scaled_dot_product_flash_attention_for_cpu_backward(
      gradient, query, key, value, out, sums.narrow(2, 0, query.size(2)), 0.0, is_causal,
      mask.defined() ? Mask(mask) : Mask(), scale);
  return {q, k, v, Tensor()};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, c10::SymInt, c10::SymInt, Tensor, Tensor, Tensor> flash(
    const Tensor& query, const Tensor& key, const Tensor& value, double, bool is_causal, bool,
    std::optional<double> scale) {
  const auto [out, sums] = at::_scaled_dot_product_flash_attention_for_cpu(
      query, key, value, 0.0, is_causal, std::nullopt, scale);
  const auto made = out.strides() == query.strides() ? out : at::empty_like(query).copy_(out);
  const auto number = query.options().dtype(at::kUInt64);
  return {made,
          sums.contiguous(),
          Tensor(),
          Tensor(),
          query.size(2),
          key.size(2),
          at::empty({2}, number),
          at::empty({}, number),
          at::empty({0}, query.options())};
}

std::tuple<Tensor, Tensor, Tensor> flash_backward(
    const Tensor& gradient, const Tensor& query, const Tensor& key, const Tensor& value,
    const Tensor& out, const Tensor& sums, const Tensor&, const Tensor&, c10::SymInt, c10::SymInt,
    double, bool is_causal, const Tensor&, const Tensor&, std::optional<double> scale) {
  return at::_scaled_dot_product_flash_attention_for_cpu_backward(
      gradient, query, key, value, out, sums, 0.0, is_causal, std::nullopt, scale);
}

TORCH_LIBRARY_IMPL(aten, CUDA, library) {
  library.impl("_fused_sdp_choice", choose);
  library.impl("_scaled_dot_product_efficient_attention", efficient);
  library.impl("_scaled_dot_product_efficient_attention_backward", efficient_backward);
  library.impl("_scaled_dot_product_flash_attention", flash);
  library.impl("_scaled_dot_product_flash_attention_backward", flash_backward);
}

}  // namespace
}  // namespace emulated

namespace at::native {

REGISTER_CUDA_DISPATCH(_fused_sdp_choice_stub, &emulated::choose)

}  // namespace at::native
