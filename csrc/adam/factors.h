// What gradients are multiplied by before they are stepped with.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "adam/kernels.h"
#include "adam/parameter.h"

namespace memsave_ext::adam {

// What is known of gradients. Scalars on their device, the factor of double and the others of
// float, all undefined where there is nothing.
struct Scaling {
  at::Tensor loss_scale;  // the gradients are multiples of it
  at::Tensor found;       // set to 1 where one is not finite, which is then not stepped with
  // Of all of them, known already: what they are multiplied by, and whether nothing is to be done.
  at::Tensor factor, skip;
};

// Factors and skips of items, and the memory they are in.
class Factors {
 public:
  Factors(const Kernels& kernels, c10::Device device, void* stream)
      : kernels_(kernels), device_(device), stream_(stream) {}

  // The items are those of the parameters, in their order.
  void find(std::vector<Item>& items, c10::ArrayRef<Parameter*> parameters, const Scaling& scaling);

 private:
  void measure(Item* items, int64_t count, double max_norm, const Scaling& scaling);

  const Kernels& kernels_;
  const c10::Device device_;
  void* const stream_;
  std::vector<at::Tensor> kept_;
};

}  // namespace memsave_ext::adam
