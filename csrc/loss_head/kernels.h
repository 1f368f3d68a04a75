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

  // Whether all classes of a token take part in its distribution, and not the target alone.
  bool mixes() const { return probabilities != nullptr || spread != 0; }
};

// Calls a function with two types, std::true_type or std::false_type: whether logits are capped,
// and Chunk::mixes().
template <typename Function>
void with_kind(const Chunk& chunk, const Function& function) {
  const auto with_cap = [&](auto caps) {
    chunk.mixes() ? function(caps, std::true_type{}) : function(caps, std::false_type{});
  };
  chunk.softcap != 0 ? with_cap(std::true_type{}) : with_cap(std::false_type{});
}

// Device pointers; `stream` is a cudaStream_t, null on the CPU. No function synchronises. Results
// are the same bits for any number of threads.
struct Kernels {
  // Adds the chunk to sums (3, tokens) of T.
  void (*reduce)(const Chunk&, void* sums, void* stream);
  // Replaces the logits by their gradients. coefficients: (4, tokens) of T.
  void (*gradient)(const Chunk&, const void* coefficients, void* stream);
};

extern const Kernels cpu_kernels;
extern const Kernels cuda_kernels;  // in a build with CUDA

}  // namespace memsave_ext::loss_head
