// The batch_norm operators of the dispatcher: they check the arguments, allocate and call a
// device's kernels. memsave_ext/batch_norm/operators.py has the schemas and their meaning.
#include <ATen/core/Tensor.h>
#include <ATen/core/stack.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <utility>
#include <vector>

#include "batch_norm/arguments.h"
#include "batch_norm/kernels.h"
#include "cuda_stream.h"
#include "vector/dtype.h"

#ifdef __linux__
#include <sys/mman.h>
#endif

namespace memsave_ext::batch_norm {
namespace {

using at::Tensor;
using Results = std::vector<Tensor>;

at::ScalarType statistic_type(const Tensor& input) {
  return input.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

// The layout of the output: that of a dense input, or else the one that torch suggests.
at::MemoryFormat layout_of(const Tensor& input) {
  if (input.is_contiguous()) return at::MemoryFormat::Contiguous;
  for (const auto format : {at::MemoryFormat::ChannelsLast, at::MemoryFormat::ChannelsLast3d}) {
    if (input.is_contiguous(format)) return format;
  }
  return input.suggest_memory_format();
}

// Asks for pages of 2 MiB for large tensors on the CPU. Linux gives fresh memory one page at a
// time, which for small pages takes longer than the computation, and by default gives large ones
// only on request.
void prefer_large_pages([[maybe_unused]] const Tensor& tensor) {
#ifdef __linux__
  constexpr uintptr_t kPage = 2 << 20;
  if (!tensor.is_cpu() || static_cast<int64_t>(tensor.nbytes()) < kFreshBytes) return;
  const auto begin = reinterpret_cast<uintptr_t>(tensor.mutable_data_ptr());
  const uintptr_t first = (begin + kPage - 1) / kPage * kPage;
  const uintptr_t last = (begin + tensor.nbytes()) / kPage * kPage;
  if (first < last) madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE);
#endif
}

// The tensors of one call, dense and in one layout, and the Problem that describes them.
class Call {
 public:
  explicit Call(const Arguments& args);

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

// Whether the kernels can take these arguments. If not, the operator's fallback says what is wrong
// with them (check() in memsave_ext/batch_norm/arguments.py).
bool can_take(const Arguments& args) {
  const Tensor& input = args.input;
  if (input.dim() < 2 || !vector::dtype_of(input.scalar_type()) ||
      Activations::find(args.activation) == Activation::kUnlisted) {
    return false;
  }
  const auto fits = [&](std::initializer_list<const Tensor*> tensors, const auto& fits_input) {
    return std::all_of(tensors.begin(), tensors.end(), [&](const Tensor* tensor) {
      return !tensor->defined() || (tensor->device() == input.device() && fits_input(*tensor));
    });
  };
  const int64_t channels = input.size(1);
  return fits({&args.weight, &args.bias, &args.running_mean, &args.running_var},
              [&](const Tensor& vector) {
                return vector.numel() == channels && vector.is_floating_point();
              }) &&
         fits({&args.residual, &args.grad},
              [&](const Tensor& like) {
                return like.sizes() == input.sizes() && like.scalar_type() == input.scalar_type();
              }) &&
         fits({&args.statistics, &args.means}, [&](const Tensor& rows) {
           return rows.sizes() == at::IntArrayRef{2, channels} &&
                  rows.scalar_type() == statistic_type(input) && rows.is_contiguous();
         });
}

Call::Call(const Arguments& args)
    : device_(args.input.device()),
      statistic_type_(statistic_type(args.input)),
      format_(layout_of(args.input)) {
  const Tensor& input = args.input;
  problem_.dtype = *vector::dtype_of(input.scalar_type());
  problem_.activation = Activations::find(args.activation);
  problem_.negative_slope = args.negative_slope;
  problem_.outer = input.size(0);
  problem_.channels = input.size(1);
  problem_.inner = 1;
  for (int64_t d = 2; d < input.dim(); ++d) problem_.inner *= input.size(d);
  if (format_ != at::MemoryFormat::Contiguous) problem_.outer *= std::exchange(problem_.inner, 1);

  input_ = dense(input);
  problem_.input = input_.const_data_ptr();
  // Takes a weight and bias of 16 bits as they are, which saves a conversion kernel for each.
  const auto like_input = [&](const Tensor& tensor) {
    return !tensor.defined() || tensor.scalar_type() == input.scalar_type();
  };
  problem_.affine_like_input = kernels().take_affine_like_input && input.element_size() == 2 &&
                               like_input(args.weight) && like_input(args.bias);
  const auto type = problem_.affine_like_input ? input.scalar_type() : statistic_type_;
  problem_.weight = channel_vector(weight_, args.weight, type);
  problem_.bias = channel_vector(bias_, args.bias, type);
  if (args.residual.defined()) {
    residual_ = dense(args.residual);
    problem_.residual = residual_.const_data_ptr();
  }
  if (kernels().workspace_bytes != nullptr && !is_empty()) {
    const auto bytes = static_cast<int64_t>(kernels().workspace_bytes(problem_));
    workspace_ = at::empty({bytes}, input_.options().dtype(at::kByte));
    problem_.workspace = workspace_.mutable_data_ptr();
  }
}

const Kernels& Call::kernels() const {
#ifdef MEMSAVE_EXT_WITH_CUDA
  if (input_.is_cuda()) return cuda_kernels;
#endif
  return cpu_kernels;
}

void* Call::stream() const { return stream_of(input_.device()); }

Tensor Call::empty() const {
  Tensor tensor = at::empty_like(input_, {}, format_);
  prefer_large_pages(tensor);
  return tensor;
}

Tensor Call::empty_grad() const {
  // Where a size is 1, the same memory can be contiguous in both formats; torch's gradient then has
  // the suggested one.
  const auto format = input_.suggest_memory_format();
  if (!input_.is_contiguous(format)) return empty();
  Tensor tensor = at::empty_like(input_, {}, format);
  prefer_large_pages(tensor);
  return tensor;
}

at::TensorOptions Call::statistic_options() const {
  return input_.options().dtype(statistic_type_);
}

Tensor Call::empty_channels() const { return at::empty({problem_.channels}, statistic_options()); }

Tensor Call::empty_statistics() const {
  return at::empty({2, problem_.channels}, statistic_options());
}

const void* Call::channel_vector(Tensor& keep, const Tensor& tensor, at::ScalarType type) {
  if (!tensor.defined()) return nullptr;
  keep = tensor.to(type).contiguous();
  return keep.const_data_ptr();
}

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

Tensor running_statistics(const Call& call, const Arguments& args) {
  const RunningBuffer mean(args.running_mean, call.statistic_options());
  const RunningBuffer var(args.running_var, call.statistic_options());
  const Tensor statistics = call.empty_statistics();
  if (call.problem().channels > 0) {
    call.kernels().running(call.problem(), args.eps, {mean.data(), var.data(), 0},
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

Results forward(const Arguments& args) {
  const bool known = args.statistics.defined();
  const bool has_running = args.running_mean.defined() && args.running_var.defined();
  if (!known && (args.training ? args.count() == 1 : !has_running)) return {};
  const Call call(args);
  if (known) return {normalize(call, args.statistics), nothing(call)};
  if (!args.training) {
    const Tensor statistics = running_statistics(call, args);
    return {normalize(call, statistics), statistics};
  }
  Tensor output = call.empty();
  if (call.is_empty()) return {output, call.empty_statistics().zero_()};  // nothing to count
  const Tensor computed = call.empty_statistics();
  RunningBuffer mean(args.running_mean, call.statistic_options());
  RunningBuffer var(args.running_var, call.statistic_options());
  call.kernels().forward(call.problem(), args.eps, {mean.data(), var.data(), args.momentum},
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

Results backward(const Arguments& args) {
  const Call call(args);
  const Tensor grad = call.dense(args.grad);
  Results gradients = wanted(call, args.output_mask);
  // Both are computed even if they are not wanted: they are by-products of the sums.
  const Tensor grad_weight = call.empty_channels();
  const Tensor grad_bias = call.empty_channels();
  if (call.is_empty()) {
    grad_weight.zero_();
    grad_bias.zero_();
  } else {
    call.kernels().backward(call.problem(), args.statistics.const_data_ptr(), args.training,
                            grad.const_data_ptr(), gradients[0].mutable_data_ptr(),
                            gradients[1].mutable_data_ptr(), grad_weight.mutable_data_ptr(),
                            grad_bias.mutable_data_ptr(), call.stream());
  }
  const auto as = [&](const Tensor& gradient, bool wanted, const Tensor& like) {
    if (!wanted) return nothing(call);
    return like.defined() ? gradient.to(like.scalar_type()) : gradient;
  };
  gradients.push_back(as(grad_weight, args.output_mask[2], args.weight));
  gradients.push_back(as(grad_bias, args.output_mask[3], args.bias));
  return gradients;
}

// Returns mean (C), m2 (C) and count as bytes, so that one collective carries both floating-point
// numbers and an integer.
Results moments(const Arguments& args) {
  const Call call(args);
  const int64_t size = 2 * call.problem().channels * call.statistic_options().dtype().itemsize();
  Tensor bytes = at::empty({size + 8}, args.input.options().dtype(at::kByte));
  bytes.narrow(0, size, 8).view(at::kLong).fill_(call.problem().count());
  if (call.is_empty()) {
    bytes.narrow(0, 0, size).zero_();
  } else {
    call.kernels().moments(call.problem(), bytes.mutable_data_ptr(), call.stream());
  }
  return {bytes};
}

Results backward_sums(const Arguments& args) {
  const Call call(args);
  const Tensor grad = call.dense(args.grad);
  if (call.is_empty()) return {call.empty_statistics().zero_()};
  Tensor sums = call.empty_statistics();
  call.kernels().backward_sums(call.problem(), args.statistics.const_data_ptr(),
                               grad.const_data_ptr(), sums.mutable_data_ptr(), call.stream());
  return {sums};
}

Results backward_input(const Arguments& args) {
  const Call call(args);
  const Tensor grad = call.dense(args.grad);
  Results gradients = wanted(call, args.output_mask);
  if (!call.is_empty()) {
    call.kernels().backward_input(call.problem(), args.statistics.const_data_ptr(),
                                  args.means.const_data_ptr(), grad.const_data_ptr(),
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
  const Arguments args = op.read(*stack);
  Results results = can_take(args) ? kernel(args) : Results();
  if (results.empty()) return handle.redispatchBoxed(c10::DispatchKeySet(), stack);
  torch::jit::drop(*stack, handle.schema().arguments().size());
  for (auto& result : results) stack->emplace_back(std::move(result));
}

template <Results (*kernel)(const Arguments&)>
torch::CppFunction as_kernel() {
  return torch::CppFunction::makeFromBoxedFunction<&boxed<kernel>>();
}

void register_operators(torch::Library& library) {
  library.impl("batch_norm_forward", as_kernel<forward>());
  library.impl("batch_norm_backward", as_kernel<backward>());
  library.impl("batch_norm_moments", as_kernel<moments>());
  library.impl("batch_norm_backward_sums", as_kernel<backward_sums>());
  library.impl("batch_norm_backward_input", as_kernel<backward_input>());
}

}  // namespace
}  // namespace memsave_ext::batch_norm

TORCH_LIBRARY_IMPL(memsave_ext, CPU, library) {
  memsave_ext::batch_norm::register_operators(library);
}
#ifdef MEMSAVE_EXT_WITH_CUDA
TORCH_LIBRARY_IMPL(memsave_ext, CUDA, library) {
  memsave_ext::batch_norm::register_operators(library);
}
#endif
