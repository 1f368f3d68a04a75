// Parameters as kernels take them: raw pointers to dense memory, the number of the step, and the
// factors by which gradients are multiplied before they are used.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/util/ArrayRef.h>

#include <vector>

#include "adam/kernels.h"
#include "adam/parameter.h"
#include "cuda_stream.h"

namespace memsave_ext::adam {

// Throws where this build has no kernels for a device.
const Kernels& kernels_for(c10::Device device);

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

  // A number, on a device that is not its own by a copy.
  const float* number(const at::Tensor& of_one, c10::Device device);

  // Copies what kernels wrote into copies back to the tensors given to change().
  void write_back();

 private:
  struct Copy {
    at::Tensor original, copy;  // original: undefined where it was only read
  };

  void* of(const at::Tensor& tensor, const at::Tensor& like, bool changes);

  std::vector<Copy> copies_;
};

// The parameter is prepared. Its item points to memory of the tensors, or of `operands`.
Item item_of(const Parameter& parameter, Operands& operands);

// Advances the step counts, and sets in each item the number of the step it makes. On CPUs, removes
// the items that are skipped, and their parameters. Throws before it has advanced any where a count
// on the host cannot be used.
void advance_steps(std::vector<Item>& items, std::vector<Parameter*>& of_items, c10::Device device);

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
