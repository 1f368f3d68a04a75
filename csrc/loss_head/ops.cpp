// The operators on a chunk of logits. Schemas: memsave_ext/loss_head/operators.py.
#include <ATen/core/Tensor.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include "cuda_stream.h"
#include "loss_head/kernels.h"
#include "vector/dtype.h"

namespace memsave_ext::loss_head {

using at::Tensor;

namespace {

constexpr const char* kName = "linear_cross_entropy: ";

void check(const char* name, const Tensor& tensor, at::IntArrayRef sizes, at::ScalarType type,
           const Tensor& logits) {
  TORCH_CHECK_VALUE(tensor.sizes() == sizes && tensor.scalar_type() == type &&
                        tensor.is_contiguous() && tensor.device() == logits.device(),
                    kName, name, " must be a contiguous ", type, " tensor of shape ", sizes, " on ",
                    logits.device(), ", got ", tensor.scalar_type(), " ", tensor.sizes(), " on ",
                    tensor.device());
}

at::ScalarType wide_type(const Tensor& logits) {
  return logits.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

Chunk chunk_of(const Tensor& logits, const std::optional<Tensor>& target,
               const std::optional<Tensor>& probabilities,
               const std::optional<Tensor>& class_weight, int64_t first, double keep, double spread,
               double softcap) {
  const auto dtype = vector::dtype_of(logits.scalar_type());
  TORCH_CHECK_VALUE(dtype && logits.dim() == 2 && logits.is_contiguous(), kName,
                    "logits must be a contiguous matrix of floating-point numbers");
  TORCH_CHECK_VALUE(target.has_value() != probabilities.has_value(), kName,
                    "either target or probabilities must be given");
  const auto wide = wide_type(logits);
  Chunk chunk{};
  chunk.dtype = *dtype;
  chunk.tokens = logits.size(0);
  chunk.classes = logits.size(1);
  chunk.first = first;
  chunk.logits = logits.mutable_data_ptr();
  if (target) {
    check("target", *target, {chunk.tokens}, at::kLong, logits);
    chunk.target = target->const_data_ptr<int64_t>();
  } else {
    check("probabilities", *probabilities, logits.sizes(), wide, logits);
    chunk.probabilities = probabilities->const_data_ptr();
  }
  if (class_weight) {
    check("class_weight", *class_weight, {chunk.classes}, wide, logits);
    chunk.class_weight = class_weight->const_data_ptr();
  }
  chunk.keep = keep;
  chunk.spread = spread;
  chunk.softcap = softcap;
  return chunk;
}

// Checks `tensor`, which has so many rows, and one more with entropy.
void take(Chunk& chunk, const char* name, const Tensor& tensor, int64_t rows,
          const Tensor& logits) {
  chunk.entropy = tensor.dim() == 2 && tensor.size(0) == rows + 1;
  check(name, tensor, {rows + chunk.entropy, chunk.tokens}, wide_type(logits), logits);
}

const Kernels& kernels_for([[maybe_unused]] c10::Device device) {
#ifdef MEMSAVE_EXT_WITH_CUDA
  if (device.is_cuda()) return cuda_kernels;
#endif
  return cpu_kernels;
}

void reduce(const Tensor& sums, const Tensor& logits, const std::optional<Tensor>& target,
            const std::optional<Tensor>& probabilities, const std::optional<Tensor>& class_weight,
            int64_t first, double keep, double spread, double softcap) {
  Chunk chunk = chunk_of(logits, target, probabilities, class_weight, first, keep, spread, softcap);
  take(chunk, "sums", sums, 3, logits);
  if (logits.numel() == 0) return;
  const c10::DeviceGuard on_device(logits.device());
  kernels_for(logits.device()).reduce(chunk, sums.mutable_data_ptr(), stream_of(logits.device()));
}

void gradient(const Tensor& logits, const Tensor& coefficients, const std::optional<Tensor>& target,
              const std::optional<Tensor>& probabilities, const std::optional<Tensor>& class_weight,
              int64_t first, double keep, double spread, double softcap) {
  Chunk chunk = chunk_of(logits, target, probabilities, class_weight, first, keep, spread, softcap);
  take(chunk, "coefficients", coefficients, 4, logits);
  if (logits.numel() == 0) return;
  const c10::DeviceGuard on_device(logits.device());
  kernels_for(logits.device())
      .gradient(chunk, coefficients.const_data_ptr(), stream_of(logits.device()));
}

void register_operators(torch::Library& library) {
  library.impl("linear_cross_entropy_reduce_", reduce);
  library.impl("linear_cross_entropy_gradient_", gradient);
}

}  // namespace
}  // namespace memsave_ext::loss_head

TORCH_LIBRARY_IMPL(memsave_ext, CPU, library) {
  memsave_ext::loss_head::register_operators(library);
}
#ifdef MEMSAVE_EXT_WITH_CUDA
TORCH_LIBRARY_IMPL(memsave_ext, CUDA, library) {
  memsave_ext::loss_head::register_operators(library);
}
#endif
