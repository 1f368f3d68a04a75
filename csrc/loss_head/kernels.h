// What a device implements, on raw pointers and without torch. The terms are those of
// memsave_ext/loss_head/operators.py.
#pragma once

#include <cstdint>
#include <type_traits>

#include "vector/types.h"

namespace memsave_ext::loss_head {

using vector::DType;

// The logits of some tokens and of the classes from `first` on. What has T in its comment is of the
// type that the logits are computed in.
struct Chunk {
  DType dtype;  // of the logits
  int64_t tokens;
  int64_t classes;  // of the chunk
  int64_t first;
  void* logits;               // (tokens, classes), dense
  const int64_t* target;      // (tokens); null with probabilities
  const void* probabilities;  // (tokens, classes) of T, dense; may be null
  const void* class_weight;   // (classes) of T; null: ones
  double keep, spread;
  double softcap;  // 0: none
  bool entropy;    // whether sums and coefficients have the row of entropies

  // Whether all classes of a token take part in its distribution, and not the target alone.
  bool mixes() const { return probabilities != nullptr || spread != 0; }
};

// The exponential of less is 0 in every type. What is multiplied by an exponential is not less than
// this, so that the product is 0 at a distance of minus infinity, too.
constexpr float kFarthest = -1000;

// Calls a function with three types, std::true_type or std::false_type: whether logits are capped,
// Chunk::mixes(), and Chunk::entropy.
template <typename Function>
void with_kind(const Chunk& chunk, const Function& function) {
  const auto with = [](bool value, const auto& next) {
    value ? next(std::true_type{}) : next(std::false_type{});
  };
  with(chunk.softcap != 0, [&](auto caps) {
    with(chunk.mixes(), [&](auto mixes) {
      with(chunk.entropy, [&](auto entropy) { function(caps, mixes, entropy); });
    });
  });
}

// Device pointers; `stream` is a cudaStream_t, null on the CPU. No function synchronises. Results
// are the same bits for any number of threads.
struct Kernels {
  // Adds the chunk to sums (3, tokens) of T, (4, tokens) with entropy.
  void (*reduce)(const Chunk&, void* sums, void* stream);
  // Replaces the logits by their gradients. coefficients: (4, tokens) of T,
  // (5, tokens) with entropy.
  void (*gradient)(const Chunk&, const void* coefficients, void* stream);
};

extern const Kernels cpu_kernels;
extern const Kernels cuda_kernels;  // in a build with CUDA

}  // namespace memsave_ext::loss_head
