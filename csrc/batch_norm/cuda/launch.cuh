// The host's side of a launch: which types and which vectors.
#pragma once

#include <algorithm>
#include <cstdint>
#include <initializer_list>

#include "batch_norm/cuda/access.cuh"
#include "batch_norm/cuda/partition.cuh"
#include "vector/launch.cuh"

namespace memsave_ext::batch_norm {

// Of a block that merges the chunks of a channel: whole warps.
inline int merging_threads(const Partition& p) {
  return static_cast<int>(std::min<int64_t>(kThreads, ceil_div(p.chunks, 32) * 32));
}

// Vectors there are kernels for, the widest first. Half of 16 bytes where values have 2: planes of
// 14 * 14 are common. One double: a warp's loads are wide enough.
inline std::initializer_list<int> vectors(DType dtype) {
  static constexpr std::initializer_list<int> kOfDouble = {1}, kOfFloat = {4, 1},
                                              kOfHalf = {8, 4, 1};
  return dtype == DType::kDouble ? kOfDouble : dtype == DType::kFloat ? kOfFloat : kOfHalf;
}

// What kernels leave for the next one.
struct Workspace {
  void* vectors;      // (C) doubles, or (2, C) statistics: first, as its place needs no partition
  double2* partials;  // (C, chunks)

  explicit Workspace(const Problem& problem)
      : vectors(problem.workspace),
        partials(static_cast<double2*>(problem.workspace) + problem.channels) {}

  static size_t bytes(const Problem& problem, const Partition& p) {
    return sizeof(double2) * static_cast<size_t>(problem.channels * (1 + p.chunks));
  }
};

// The widest that divides planes or rows and that all addresses allow.
inline int widest_vector(const Problem& problem, std::initializer_list<const void*> tensors) {
  const int64_t length = in_rows(problem) ? problem.channels : problem.inner;
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

// Calls function(Access) with the type of the problem and its layout.
template <bool rows, typename Function>
void with_vector(DType dtype, int vector, const Function& function) {
  switch (dtype) {
    case DType::kDouble:
      return function(Access<double, 1, rows>{});
    case DType::kFloat:
      return vector == 4 ? function(Access<float, 4, rows>{}) : function(Access<float, 1, rows>{});
    case DType::kHalf:
      return vector == 8   ? function(Access<__half, 8, rows>{})
             : vector == 4 ? function(Access<__half, 4, rows>{})
                           : function(Access<__half, 1, rows>{});
    case DType::kBFloat16:
      return vector == 8   ? function(Access<__nv_bfloat16, 8, rows>{})
             : vector == 4 ? function(Access<__nv_bfloat16, 4, rows>{})
                           : function(Access<__nv_bfloat16, 1, rows>{});
  }
}

template <typename Function>
void with_access(const Problem& problem, int vector, const Function& function) {
  if (in_rows(problem)) return with_vector<true>(problem.dtype, vector, function);
  return with_vector<false>(problem.dtype, vector, function);
}

// Kernels of more than one file.
struct Summary;
struct ChannelSums;

void launch_moments(const Problem& problem, const Summary& to, void* stream);
void launch_running(const Problem& problem, double eps, const Running& running, void* statistics,
                    void* stream);
void launch_normalize(const Problem& problem, const void* statistics, void* output, void* stream);
void launch_backward_sums(const Problem& problem, const void* statistics, const void* grad,
                          const ChannelSums& to, void* stream);
// Null means: 0.
void launch_backward_input(const Problem& problem, const void* statistics, const void* means,
                           const void* grad, void* grad_input, void* grad_residual, void* stream);

// All of forward or backward with a channel's values in shared memory: every tensor is read once.
// False, and nothing done, where they do not fit.
bool launch_forward_onchip(const Problem& problem, const Summary& to, void* output, void* stream);
bool launch_backward_onchip(const Problem& problem, const void* statistics, const void* grad,
                            void* grad_input, void* grad_residual, const ChannelSums& to,
                            void* stream);

}  // namespace memsave_ext::batch_norm
