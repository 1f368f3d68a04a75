// Memory of tensors as kernels take it.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "adam/kernels.h"

namespace memsave_ext::adam {

// Of the real numbers that complex values are pairs of.
DType real_dtype(at::ScalarType type);

// A tensor of real numbers in the order in which kernels are given those of `tensor`.
at::Tensor layout_of(const at::Tensor& tensor);

// Tensors in the order of elements of their parameter: their own memory, or copies that are written
// back.
class Operands {
 public:
  // Null for an undefined tensor.
  void* read(const at::Tensor& tensor, const at::Tensor& like) { return of(tensor, like, false); }
  void* change(const at::Tensor& tensor, const at::Tensor& like) { return of(tensor, like, true); }

  void write_back();

 private:
  struct Copy {
    at::Tensor original, copy;  // the first undefined where it has only been read
  };

  void* of(const at::Tensor& tensor, const at::Tensor& like, bool changes);

  std::vector<Copy> copies_;
};

}  // namespace memsave_ext::adam
