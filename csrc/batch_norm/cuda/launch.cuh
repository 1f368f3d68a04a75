// The host's side of a launch: chooses the types and the vector width of a kernel.
#pragma once

#include <algorithm>
#include <cstdint>
#include <initializer_list>

#include "batch_norm/cuda/access.cuh"
#include "batch_norm/cuda/partition.cuh"
#include "vector/launch.cuh"

namespace memsave_ext::batch_norm {

// Returns the threads of a block that merges the chunks of a channel, in whole warps.
inline int merging_threads(const Partition& p) {
  return static_cast<int>(std::min<int64_t>(kThreads, ceil_div(p.chunks, 32) * 32));
}

// What a kernel leaves in Problem::workspace for the next one.
struct Workspace {
  // (C) doubles, or (2, C) values of the statistics' type. They come first, where their address
  // does not depend on the partition.
  void* vectors;
  double2* partials;  // (C, chunks)

  explicit Workspace(const Problem& problem)
      : vectors(problem.workspace),
        partials(static_cast<double2*>(problem.workspace) + problem.channels) {}

  static size_t bytes(const Problem& problem, const Partition& p) {
    return sizeof(double2) * static_cast<size_t>(problem.channels * (1 + p.chunks));
  }
};

// Returns the widest loads for tensors at these addresses; null ones do not count.
inline Loads widest_loads(const Problem& problem, std::initializer_list<const void*> tensors) {
  for (const int vector : vectors(problem.dtype)) {
    bool fits = length_of(problem) % vector == 0;
    for (const void* tensor : tensors) {
      const auto address = reinterpret_cast<uintptr_t>(tensor);
      fits = fits && address % (vector * item_size(problem.dtype)) == 0;
    }
    if (fits && vector > 1) return {vector};
  }
  if (!can_mask(problem)) return {1};
  Loads masked = {*vectors(problem.dtype).begin(), true, -1};
  for (const void* tensor : tensors) {
    if (tensor == nullptr) continue;
    const auto address = reinterpret_cast<uintptr_t>(tensor);
    const int begin = static_cast<int>(address / item_size(problem.dtype) % masked.vector);
    if (masked.begin >= 0 && begin != masked.begin) return {1};
    masked.begin = begin;
  }
  return masked;
}

template <typename T, int widest, bool channels_last, typename Function>
void with_width(const Loads& loads, const Function& function) {
  if (loads.masked) return function(Access<T, widest, channels_last, true>{});
  if (loads.vector == widest) return function(Access<T, widest, channels_last, false>{});
  if constexpr (widest == 8) {
    if (loads.vector == 4) return function(Access<T, 4, channels_last, false>{});
  }
  function(Access<T, 1, channels_last, false>{});
}

// Calls function(Access) for this type, these loads and layout.
template <bool channels_last, typename Function>
void with_loads(DType dtype, const Loads& loads, const Function& function) {
  switch (dtype) {
    case DType::kDouble:
      return function(Access<double, 1, channels_last, false>{});
    case DType::kFloat:
      return with_width<float, 4, channels_last>(loads, function);
    case DType::kHalf:
      return with_width<__half, 8, channels_last>(loads, function);
    case DType::kBFloat16:
      return with_width<__nv_bfloat16, 8, channels_last>(loads, function);
  }
}

template <typename Function>
void with_access(const Problem& problem, const Loads& loads, const Function& function) {
  if (is_channels_last(problem)) return with_loads<true>(problem.dtype, loads, function);
  return with_loads<false>(problem.dtype, loads, function);
}

// Launches that another file uses.
struct Summary;
struct ChannelSums;

void launch_moments(const Problem& problem, const Summary& to, void* stream);
void launch_running(const Problem& problem, double eps, const Running& running, void* statistics,
                    void* stream);
void launch_normalize(const Problem& problem, const void* statistics, void* output, void* stream);
void launch_backward_sums(const Problem& problem, const void* statistics, const void* grad,
                          const ChannelSums& to, void* stream);
// Null `means` stand for zeros.
void launch_backward_input(const Problem& problem, const void* statistics, const void* means,
                           const void* grad, void* grad_input, void* grad_residual, void* stream);

// Forward or backward in one kernel that holds a channel's values in shared memory, so that every
// tensor is read once. Returns false, without a launch, where fit_onchip() rejects the problem.
bool launch_forward_onchip(const Problem& problem, const Summary& to, void* output, void* stream);
bool launch_backward_onchip(const Problem& problem, const void* statistics, const void* grad,
                            void* grad_input, void* grad_residual, const ChannelSums& to,
                            void* stream);

}  // namespace memsave_ext::batch_norm
