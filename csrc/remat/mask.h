// What bernoulli_ has made, zeros and ones of any dtype, as bits: drawing the numbers again would
// take a CPU as long as a product of matrices.
#pragma once

#include <ATen/core/Tensor.h>

namespace memsave_ext::remat {

// Of a dense tensor on the CPU, in the order of its memory.
at::Tensor pack_mask(const at::Tensor& values);

// Into a storage of this dtype.
void unpack_mask(const at::Tensor& bits, caffe2::TypeMeta dtype, const c10::Storage& to);

}  // namespace memsave_ext::remat
