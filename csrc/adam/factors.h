// The factors by which gradients are multiplied before they are used: clipping and unscaling.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "adam/kernels.h"
#include "adam/parameter.h"

namespace memsave_ext::adam {

// How gradients are scaled. Scalars on their device: `factor` is a double, the others are floats.
// Each is undefined where it does not apply. `factor` and `skip` may also be vectors, with an
// element for each parameter.
struct Scaling {
  at::Tensor grad_scale;  // the gradients are to be divided by it
  at::Tensor found_inf;   // set to 1 where a gradient is not finite, which is not used
  // Known in advance: the factor of gradients, and whether (not 0) to skip them.
  at::Tensor factor, skip;
};

// Finds the factors and skips of items, and owns their memory.
class Factors {
 public:
  Factors(const Kernels& kernels, c10::Device device, void* stream)
      : kernels_(kernels), device_(device), stream_(stream) {}

  // Sets `factor` and `skip` of the items, which belong to the parameters in the same order.
  void find(std::vector<Item>& items, c10::ArrayRef<Parameter*> parameters, const Scaling& scaling);

 private:
  void measure(Item* items, int64_t count, double max_norm, const Scaling& scaling);

  const Kernels& kernels_;
  const c10::Device device_;
  void* const stream_;
  std::vector<at::Tensor> kept_;  // the memory of factors and skips
};

}  // namespace memsave_ext::adam
