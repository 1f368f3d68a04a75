#include "batch_norm/call.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>

#include <cstdint>
#include <utility>

#include "vector/dtype.h"

#ifdef MEMSAVE_EXT_WITH_CUDA
#include "cuda_stream.h"
#endif

#ifdef __linux__
#include <sys/mman.h>
#endif

namespace memsave_ext::batch_norm {

using at::Tensor;

namespace {

DType checked_dtype(const Tensor& input) {
  const auto dtype = vector::dtype_of(input.scalar_type());
  TORCH_CHECK_NOT_IMPLEMENTED(dtype, "\"batch_norm\" not implemented for '", input.scalar_type(),
                              "'");
  return *dtype;
}

void check_device(const char* name, const Tensor& tensor, const Tensor& input) {
  TORCH_CHECK(tensor.device() == input.device(),
              "batch_norm: expected all tensors to be on the same device, but ", name, " is on ",
              tensor.device(), " and input on ", input.device());
}

void check_like_input(const char* name, const Tensor& tensor, const Tensor& input) {
  check_device(name, tensor, input);
  TORCH_CHECK(tensor.sizes() == input.sizes() && tensor.scalar_type() == input.scalar_type(),
              "batch_norm: ", name, " must have the shape and dtype of input, ", input.sizes(), " ",
              input.scalar_type(), ", got ", tensor.sizes(), " ", tensor.scalar_type());
}

// Of the output. Dense inputs keep their layout.
at::MemoryFormat layout_of(const Tensor& input) {
  if (input.is_contiguous()) return at::MemoryFormat::Contiguous;
  for (const auto format : {at::MemoryFormat::ChannelsLast, at::MemoryFormat::ChannelsLast3d}) {
    if (input.is_contiguous(format)) return format;
  }
  return input.suggest_memory_format();
}

// What this large comes from the system a page at a time, and that takes longer than the kernel:
// asks for pages of 2 MiB, which the kernel of Linux by default gives only to who asks.
void prefer_large_pages([[maybe_unused]] const Tensor& tensor) {
#ifdef __linux__
  constexpr uintptr_t kPage = 2 << 20;
  if (!tensor.is_cpu() || tensor.nbytes() < (32 << 20)) return;
  const auto begin = reinterpret_cast<uintptr_t>(tensor.mutable_data_ptr());
  const uintptr_t first = (begin + kPage - 1) / kPage * kPage;
  const uintptr_t last = (begin + tensor.nbytes()) / kPage * kPage;
  if (first < last) madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE);
#endif
}

}  // namespace

Activation parse_activation(std::string_view name) {
  if (name == "none") return Activation::kIdentity;
  if (name == "relu") return Activation::kRelu;
  TORCH_CHECK_VALUE(name == "leaky_relu",
                    "batch_norm: activation must be 'none', 'relu' or 'leaky_relu', got '", name,
                    "'");
  return Activation::kLeakyRelu;
}

void check_channels(const char* name, const MaybeTensor& tensor, const Tensor& input) {
  if (!given(tensor)) return;
  check_device(name, *tensor, input);
  TORCH_CHECK(tensor->numel() == input.size(1), name, " should contain ", input.size(1),
              " elements not ", tensor->numel());
  TORCH_CHECK(tensor->is_floating_point(), "batch_norm: ", name,
              " must be a floating-point tensor, got ", tensor->scalar_type());
}

Call::Call(const Tensor& input, const MaybeTensor& weight, const MaybeTensor& bias,
           const MaybeTensor& residual, std::string_view activation, double negative_slope)
    : device_(input.device()),
      statistic_type_(input.scalar_type() == at::kDouble ? at::kDouble : at::kFloat),
      format_(layout_of(input)) {
  TORCH_CHECK(input.dim() >= 2, "batch_norm: expected an input of shape (N, C, *), got ",
              input.sizes());
  problem_.dtype = checked_dtype(input);
  problem_.activation = parse_activation(activation);
  problem_.negative_slope = negative_slope;
  check_channels("weight", weight, input);
  check_channels("bias", bias, input);
  if (given(residual)) check_like_input("residual", *residual, input);

  problem_.outer = input.size(0);
  problem_.channels = input.size(1);
  problem_.inner = 1;
  for (int64_t d = 2; d < input.dim(); ++d) problem_.inner *= input.size(d);
  if (format_ != at::MemoryFormat::Contiguous) problem_.outer *= std::exchange(problem_.inner, 1);

  input_ = dense(input);
  problem_.input = input_.const_data_ptr();
  problem_.weight = channel_vector(weight_, weight);
  problem_.bias = channel_vector(bias_, bias);
  if (given(residual)) {
    residual_ = dense(*residual);
    problem_.residual = residual_.const_data_ptr();
  }
  if (kernels().workspace_bytes != nullptr) {
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

void* Call::stream() const {
#ifdef MEMSAVE_EXT_WITH_CUDA
  if (input_.is_cuda()) return current_cuda_stream(input_.device());
#endif
  return nullptr;
}

Tensor Call::empty() const {
  Tensor tensor = at::empty_like(input_, {}, format_);
  prefer_large_pages(tensor);
  return tensor;
}

Tensor Call::empty_grad() const {
  // Where a size is 1 the same memory may be contiguous in both ways.
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

const void* Call::check_statistics(const char* name, const Tensor& tensor) const {
  check_device(name, tensor, input_);
  TORCH_CHECK(tensor.dim() == 2 && tensor.size(0) == 2 && tensor.size(1) == problem_.channels &&
                  tensor.scalar_type() == statistic_type_ && tensor.is_contiguous(),
              "batch_norm: ", name, " must be a contiguous ", statistic_type_,
              " tensor of shape [2, ", problem_.channels, "], got ", tensor.scalar_type(), " ",
              tensor.sizes());
  return tensor.const_data_ptr();
}

Tensor Call::dense_grad(const Tensor& grad) const {
  check_like_input("grad", grad, input_);
  return dense(grad);
}

const void* Call::channel_vector(Tensor& keep, const MaybeTensor& tensor) const {
  if (!given(tensor)) return nullptr;
  keep = tensor->to(statistic_type_).contiguous();
  return keep.const_data_ptr();
}

}  // namespace memsave_ext::batch_norm
