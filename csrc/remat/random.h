// Lets an operator draw the same random numbers again.
#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <memory>
#include <optional>
#include <vector>

#include "checkpoint/rng.h"
#include "remat/operators.h"

namespace memsave_ext::remat {

// The state of an operator's generator before it ran.
struct Random {
  // A copy of its generator, which is passed to it, so that no generator in use is touched. Empty
  // where `defaults` is set.
  std::optional<at::Generator> generator;
  // The state of the default generators of its devices; null where `generator` is set.
  std::shared_ptr<const checkpoint::RngState> defaults;

  // Returns the present state for a call; nothing where the numbers cannot be drawn again.
  static std::optional<Random> of(const Operator& op, c10::ArrayRef<const c10::IValue> arguments);
};

// Those of an operator's tensors, and those that it is told to make tensors on.
checkpoint::CudaDevices devices_of(c10::ArrayRef<const c10::IValue> arguments);

// Makes the operator draw the same numbers in this scope.
class RandomGuard {
 public:
  RandomGuard(const Random& random, const Operator& op, std::vector<c10::IValue>& arguments);

 private:
  std::optional<checkpoint::RngGuard> defaults_;
};

// The result of bernoulli_, zeros and ones of any dtype, as bits: drawing the numbers again would
// take a CPU as long as a matrix product.

// Packs a dense CPU tensor in the order of its memory, 8 elements a byte.
at::Tensor pack_mask(const at::Tensor& values);

// Fills a storage of this dtype with the packed values.
void unpack_mask(const at::Tensor& bits, caffe2::TypeMeta dtype, const c10::Storage& to);

}  // namespace memsave_ext::remat
