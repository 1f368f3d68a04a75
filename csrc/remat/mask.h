// Packs the results of bernoulli_, zeros and ones of any dtype, as bits. Drawing the numbers again
// would take a CPU as long as a matrix product.
#pragma once

#include <ATen/core/Tensor.h>

namespace memsave_ext::remat {

// Packs a dense CPU tensor in the order of its memory, 8 elements a byte.
at::Tensor pack_mask(const at::Tensor& values);

// Fills a storage of this dtype with the packed values.
void unpack_mask(const at::Tensor& bits, caffe2::TypeMeta dtype, const c10::Storage& to);

}  // namespace memsave_ext::remat
