#include "batch_norm/call.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>

#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <optional>
#include <utility>

#include "cuda_stream.h"
#include "vector/dtype.h"

#ifdef __linux__
#include <sys/mman.h>
#endif

namespace memsave_ext::batch_norm {

using at::Tensor;

namespace {

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

}  // namespace

bool can_take(const Arguments& of) {
  const Tensor& input = of.input;
  if (input.dim() < 2 || !vector::dtype_of(input.scalar_type()) ||
      Activations::find(of.activation) == Activation::kUnlisted) {
    return false;
  }
  const auto fits = [&](std::initializer_list<const Tensor*> tensors, const auto& fits_input) {
    return std::all_of(tensors.begin(), tensors.end(), [&](const Tensor* tensor) {
      return !tensor->defined() || (tensor->device() == input.device() && fits_input(*tensor));
    });
  };
  const int64_t channels = input.size(1);
  return fits({&of.weight, &of.bias, &of.running_mean, &of.running_var},
              [&](const Tensor& vector) {
                return vector.numel() == channels && vector.is_floating_point();
              }) &&
         fits({&of.residual, &of.grad},
              [&](const Tensor& like) {
                return like.sizes() == input.sizes() && like.scalar_type() == input.scalar_type();
              }) &&
         fits({&of.statistics, &of.means}, [&](const Tensor& rows) {
           return rows.sizes() == at::IntArrayRef{2, channels} &&
                  rows.scalar_type() == statistic_type(input) && rows.is_contiguous();
         });
}

Call::Call(const Arguments& of)
    : device_(of.input.device()),
      statistic_type_(statistic_type(of.input)),
      format_(layout_of(of.input)) {
  const Tensor& input = of.input;
  problem_.dtype = *vector::dtype_of(input.scalar_type());
  problem_.activation = Activations::find(of.activation);
  problem_.negative_slope = of.negative_slope;
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
                               like_input(of.weight) && like_input(of.bias);
  const auto type = problem_.affine_like_input ? input.scalar_type() : statistic_type_;
  problem_.weight = channel_vector(weight_, of.weight, type);
  problem_.bias = channel_vector(bias_, of.bias, type);
  if (of.residual.defined()) {
    residual_ = dense(of.residual);
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

}  // namespace memsave_ext::batch_norm
