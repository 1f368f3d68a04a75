#include "batch_norm/ops.h"

#include <ATen/core/stack.h>
#include <ATen/ops/empty.h>

#include <vector>

#include "batch_norm/call.h"

namespace memsave_ext::batch_norm {
namespace {

using at::Tensor;
using Results = std::vector<Tensor>;

// A running buffer in the type that kernels compute in; store() writes a converted one back.
class RunningBuffer {
 public:
  RunningBuffer(const Tensor& buffer, const at::TensorOptions& options) : buffer_(buffer) {
    if (buffer.defined()) computed_ = buffer.to(options.dtype()).contiguous();
  }
  void* data() const { return computed_.defined() ? computed_.mutable_data_ptr() : nullptr; }
  void store() {
    if (computed_.defined() && !computed_.is_same(buffer_)) buffer_.copy_(computed_);
  }

 private:
  Tensor buffer_, computed_;
};

Tensor nothing(const Call& call) { return at::empty({0}, call.statistic_options()); }

Tensor running_statistics(const Call& call, const Arguments& of) {
  const RunningBuffer mean(of.running_mean, call.statistic_options());
  const RunningBuffer var(of.running_var, call.statistic_options());
  const Tensor statistics = call.empty_statistics();
  if (call.problem().channels > 0) {
    call.kernels().running(call.problem(), of.eps, {mean.data(), var.data(), 0},
                           statistics.mutable_data_ptr(), call.stream());
  }
  return statistics;
}

Tensor normalize(const Call& call, const Tensor& statistics) {
  Tensor output = call.empty();
  if (!call.is_empty()) {
    call.kernels().normalize(call.problem(), statistics.const_data_ptr(), output.mutable_data_ptr(),
                             call.stream());
  }
  return output;
}

Results forward(const Arguments& of) {
  const bool known = of.statistics.defined();
  const bool has_running = of.running_mean.defined() && of.running_var.defined();
  if (!known && (of.training ? of.count() == 1 : !has_running)) return {};
  const Call call(of);
  if (known) return {normalize(call, of.statistics), nothing(call)};
  if (!of.training) {
    const Tensor statistics = running_statistics(call, of);
    return {normalize(call, statistics), statistics};
  }
  Tensor output = call.empty();
  if (call.is_empty()) return {output, call.empty_statistics().zero_()};  // nothing to count
  const Tensor computed = call.empty_statistics();
  RunningBuffer mean(of.running_mean, call.statistic_options());
  RunningBuffer var(of.running_var, call.statistic_options());
  call.kernels().forward(call.problem(), of.eps, {mean.data(), var.data(), of.momentum},
                         computed.mutable_data_ptr(), output.mutable_data_ptr(), call.stream());
  mean.store();
  var.store();
  return {output, computed};
}

// Allocates the gradients of input and residual; one that is not wanted is empty, with a null
// address.
Results wanted(const Call& call, const c10::List<bool>& mask) {
  return {mask[0] ? call.empty_grad() : nothing(call), mask[1] ? call.empty_grad() : nothing(call)};
}

Results backward(const Arguments& of) {
  const Call call(of);
  const Tensor grad = call.dense(of.grad);
  Results gradients = wanted(call, of.output_mask);
  // Both are computed even if they are not wanted: they are by-products of the sums.
  const Tensor grad_weight = call.empty_channels();
  const Tensor grad_bias = call.empty_channels();
  if (call.is_empty()) {
    grad_weight.zero_();
    grad_bias.zero_();
  } else {
    call.kernels().backward(call.problem(), of.statistics.const_data_ptr(), of.training,
                            grad.const_data_ptr(), gradients[0].mutable_data_ptr(),
                            gradients[1].mutable_data_ptr(), grad_weight.mutable_data_ptr(),
                            grad_bias.mutable_data_ptr(), call.stream());
  }
  const auto as = [&](const Tensor& gradient, bool wanted, const Tensor& like) {
    if (!wanted) return nothing(call);
    return like.defined() ? gradient.to(like.scalar_type()) : gradient;
  };
  gradients.push_back(as(grad_weight, of.output_mask[2], of.weight));
  gradients.push_back(as(grad_bias, of.output_mask[3], of.bias));
  return gradients;
}

// Returns mean (C), m2 (C) and count as bytes, so that one collective carries both floating-point
// numbers and an integer.
Results moments(const Arguments& of) {
  const Call call(of);
  const int64_t size = 2 * call.problem().channels * call.statistic_options().dtype().itemsize();
  Tensor bytes = at::empty({size + 8}, of.input.options().dtype(at::kByte));
  bytes.narrow(0, size, 8).view(at::kLong).fill_(call.problem().count());
  if (call.is_empty()) {
    bytes.narrow(0, 0, size).zero_();
  } else {
    call.kernels().moments(call.problem(), bytes.mutable_data_ptr(), call.stream());
  }
  return {bytes};
}

Results backward_sums(const Arguments& of) {
  const Call call(of);
  const Tensor grad = call.dense(of.grad);
  if (call.is_empty()) return {call.empty_statistics().zero_()};
  Tensor sums = call.empty_statistics();
  call.kernels().backward_sums(call.problem(), of.statistics.const_data_ptr(),
                               grad.const_data_ptr(), sums.mutable_data_ptr(), call.stream());
  return {sums};
}

Results backward_input(const Arguments& of) {
  const Call call(of);
  const Tensor grad = call.dense(of.grad);
  Results gradients = wanted(call, of.output_mask);
  if (!call.is_empty()) {
    call.kernels().backward_input(call.problem(), of.statistics.const_data_ptr(),
                                  of.means.const_data_ptr(), grad.const_data_ptr(),
                                  gradients[0].mutable_data_ptr(), gradients[1].mutable_data_ptr(),
                                  call.stream());
  }
  return gradients;
}

// The operator, called boxed. Arguments that `kernel` cannot take, or for which it returns nothing,
// go to the operator's fallback, which the empty dispatch key set selects. So the messages for
// wrong arguments exist only there.
template <Results (*kernel)(const Arguments&)>
void boxed(const c10::OperatorHandle& handle, torch::jit::Stack* stack) {
  static const Operator op(handle);
  const Arguments of = op.read(*stack);
  Results results = can_take(of) ? kernel(of) : Results();
  if (results.empty()) return handle.redispatchBoxed(c10::DispatchKeySet(), stack);
  torch::jit::drop(*stack, handle.schema().arguments().size());
  for (auto& result : results) stack->emplace_back(std::move(result));
}

template <Results (*kernel)(const Arguments&)>
torch::CppFunction as_kernel() {
  return torch::CppFunction::makeFromBoxedFunction<&boxed<kernel>>();
}

}  // namespace

void register_operators(torch::Library& library) {
  library.impl("batch_norm_forward", as_kernel<forward>());
  library.impl("batch_norm_backward", as_kernel<backward>());
  library.impl("batch_norm_moments", as_kernel<moments>());
  library.impl("batch_norm_backward_sums", as_kernel<backward_sums>());
  library.impl("batch_norm_backward_input", as_kernel<backward_input>());
}

}  // namespace memsave_ext::batch_norm

TORCH_LIBRARY_IMPL(memsave_ext, CPU, library) {
  memsave_ext::batch_norm::register_operators(library);
}
