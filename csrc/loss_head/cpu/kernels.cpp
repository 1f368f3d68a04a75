// The kernels on CPUs: tokens are divided among threads.
#include <ATen/Parallel.h>

#include <algorithm>

#include "loss_head/cpu/loops.h"

namespace memsave_ext::loss_head {

const cpu::Loops& cpu::loops_of(DType dtype) {
  static const AllLoops& chosen = MEMSAVE_EXT_TABLE_OF_THIS_CPU(kAllLoops);
  return chosen.loops[static_cast<int>(dtype)];
}

namespace {

constexpr int64_t kGrain = 32768;  // logits; fewer are not worth a thread

template <typename Body>
void for_tokens(const Chunk& chunk, const Body& body) {
  const int64_t grain = std::max<int64_t>(1, kGrain / std::max<int64_t>(1, chunk.classes));
  at::parallel_for(0, chunk.tokens, grain, body);
}

void reduce_kernel(const Chunk& chunk, void* sums, void*) {
  const auto& loops = cpu::loops_of(chunk.dtype);
  for_tokens(chunk, [&](int64_t begin, int64_t end) { loops.reduce(chunk, sums, begin, end); });
}

void gradient_kernel(const Chunk& chunk, const void* coefficients, void*) {
  const auto& loops = cpu::loops_of(chunk.dtype);
  for_tokens(chunk,
             [&](int64_t begin, int64_t end) { loops.gradient(chunk, coefficients, begin, end); });
}

}  // namespace

const Kernels cpu_kernels = {reduce_kernel, gradient_kernel};

}  // namespace memsave_ext::loss_head
