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

// Returns the vector widths, in values, that have kernels; the widest first. Values of 16 bits also
// have one of 8 bytes, because planes of 14 * 14 are common. Doubles are loaded one at a time,
// which makes a warp's loads wide enough.
inline std::initializer_list<int> vectors(DType dtype) {
  static constexpr std::initializer_list<int> kOfDouble = {1}, kOfFloat = {4, 1},
                                              kOfHalf = {8, 4, 1};
  return dtype == DType::kDouble ? kOfDouble : dtype == DType::kFloat ? kOfFloat : kOfHalf;
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

// Returns the widest vector that divides a plane or row and to which all addresses are aligned.
inline int widest_vector(const Problem& problem, std::initializer_list<const void*> tensors) {
  const int64_t length = is_channels_last(problem) ? problem.channels : problem.inner;
  for (const int vector : vectors(problem.dtype)) {
    bool fits = length % vector == 0;
    for (const void* tensor : tensors) {
      const auto address = reinterpret_cast<uintptr_t>(tensor);
      fits = fits && address % (vector * item_size(problem.dtype)) == 0;
    }
    if (fits) return vector;
  }
  return 1;
}

// Calls function(Access) for this type, vector width and layout.
template <bool channels_last, typename Function>
void with_vector(DType dtype, int vector, const Function& function) {
  switch (dtype) {
    case DType::kDouble:
      return function(Access<double, 1, channels_last>{});
    case DType::kFloat:
      return vector == 4 ? function(Access<float, 4, channels_last>{})
                         : function(Access<float, 1, channels_last>{});
    case DType::kHalf:
      return vector == 8   ? function(Access<__half, 8, channels_last>{})
             : vector == 4 ? function(Access<__half, 4, channels_last>{})
                           : function(Access<__half, 1, channels_last>{});
    case DType::kBFloat16:
      return vector == 8   ? function(Access<__nv_bfloat16, 8, channels_last>{})
             : vector == 4 ? function(Access<__nv_bfloat16, 4, channels_last>{})
                           : function(Access<__nv_bfloat16, 1, channels_last>{});
  }
}

template <typename Function>
void with_access(const Problem& problem, int vector, const Function& function) {
  if (is_channels_last(problem)) return with_vector<true>(problem.dtype, vector, function);
  return with_vector<false>(problem.dtype, vector, function);
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
