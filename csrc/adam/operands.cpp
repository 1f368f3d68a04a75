#include "adam/operands.h"

#include <ATen/ops/empty_like.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/view_as_complex.h>
#include <ATen/ops/view_as_real.h>

#include "vector/dtype.h"

namespace memsave_ext::adam {

using at::Tensor;

namespace {

Tensor as_real(const Tensor& tensor) {
  return tensor.is_complex() ? at::view_as_real(tensor) : tensor;
}

// Returns whether the memory does not hold the tensor's values: conjugate and negative views, and
// zeros without memory.
bool is_lazy(const Tensor& tensor) {
  constexpr c10::DispatchKeySet lazy(
      {c10::DispatchKey::Conjugate, c10::DispatchKey::Negative, c10::DispatchKey::ZeroTensor});
  return tensor.key_set().has_any(lazy);
}

// Returns whether two tensors of one shape have the same element order. Contiguous ones may differ
// in the strides of dimensions of size 1.
bool have_one_order(const Tensor& a, const Tensor& b) {
  return (a.is_contiguous() && b.is_contiguous()) || a.strides() == b.strides();
}

}  // namespace

DType real_dtype(at::ScalarType type) {
  const auto dtype = vector::dtype_of(c10::toRealValueType(type));
  TORCH_CHECK(dtype, "memsave_ext: tensors must be floating-point or complex, got ", type);
  return *dtype;
}

Tensor layout_of(const Tensor& tensor) {
  if (!tensor.is_non_overlapping_and_dense()) {
    return as_real(at::empty_like(tensor, at::MemoryFormat::Contiguous));
  }
  if (!tensor.is_complex() || !is_lazy(tensor)) return as_real(tensor);
  return as_real(at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options()));
}

void* Operands::of(const Tensor& tensor, const Tensor& like, bool changes) {
  if (!tensor.defined()) return nullptr;
  if (!is_lazy(tensor)) {
    if (!tensor.is_complex()) {
      if (have_one_order(tensor, like)) return tensor.mutable_data_ptr();
    } else if (const Tensor view = as_real(tensor); have_one_order(view, like)) {
      return view.mutable_data_ptr();
    }
  }
  const auto real = c10::toRealValueType(tensor.scalar_type());
  const Tensor copy = at::empty_strided(like.sizes(), like.strides(), tensor.options().dtype(real));
  const Tensor same = tensor.is_complex() ? at::view_as_complex(copy) : copy;
  same.copy_(tensor);
  copies_.push_back({changes ? tensor : Tensor(), same});
  return copy.mutable_data_ptr();
}

void Operands::write_back() {
  for (const auto& [original, copy] : copies_) {
    if (original.defined()) original.copy_(copy);
  }
}

}  // namespace memsave_ext::adam
