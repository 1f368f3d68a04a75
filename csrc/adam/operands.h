// The memory of tensors in the element order that kernels take.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "adam/kernels.h"

namespace memsave_ext::adam {

// Returns the dtype of a tensor's elements; for a complex type, that of its real and imaginary
// parts. Throws where kernels do not take the type.
DType real_dtype(at::ScalarType type);

// Returns a real tensor with the sizes and strides in which kernels take `tensor`. Its values may
// be uninitialised.
at::Tensor layout_of(const at::Tensor& tensor);

// Gives kernels the memory of tensors in the element order of their parameter, `like`: their own
// memory where they have that order, else a copy.
class Operands {
 public:
  // Both return null for an undefined tensor. change(): write_back() copies the new values back.
  void* read(const at::Tensor& tensor, const at::Tensor& like) { return of(tensor, like, false); }
  void* change(const at::Tensor& tensor, const at::Tensor& like) { return of(tensor, like, true); }

  // Copies what kernels wrote into copies back to the tensors given to change().
  void write_back();

 private:
  struct Copy {
    at::Tensor original, copy;  // original: undefined where it was only read
  };

  void* of(const at::Tensor& tensor, const at::Tensor& like, bool changes);

  std::vector<Copy> copies_;
};

}  // namespace memsave_ext::adam
