// Computes output = activate(normalize(input) + residual) from statistics, and statistics from
// running ones.
#include "batch_norm/cuda/launch.cuh"
#include "batch_norm/cuda/values.cuh"

namespace memsave_ext::batch_norm {
namespace {

template <typename A>
__global__ void __launch_bounds__(kThreads)
    normalize_kernel(Problem problem, Partition p, const void* statistics, void* output) {
  using Vec = typename A::Vec;
  // Takes the blocks in reverse: what the kernel before has read last is still in the cache.
  typename A::Walk walk(p, gridDim.x - 1 - blockIdx.x, threadIdx.x);
  if (!walk.more()) return;
  const Affine<A> affine(problem, statistics, walk.channels(p));
  while (walk.more()) {
    Vec x[A::kUnroll], residual[A::kUnroll];
    Place places[A::kUnroll];
    take(walk, p, places);
    load_all<A>(problem.input, p, places, x);
    load_residual<A>(problem.residual != nullptr, problem, p, places, residual);
#pragma unroll
    for (int u = 0; u < A::kUnroll; ++u) {
      if (!places[u].there()) continue;
      store_at<A>(output, places[u], output_of(problem, affine, x[u], residual[u]));
    }
  }
}

template <typename Value>
__global__ void __launch_bounds__(kThreads)
    running_kernel(const Value* mean, const Value* var, double eps, int64_t channels,
                   Value* statistics) {
  const int64_t channel = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (channel >= channels) return;
  statistics[channel] = mean[channel];
  statistics[channels + channel] = invstd_of(var[channel], eps);
}

}  // namespace

void launch_running(const Problem& problem, double eps, const Running& running, void* statistics,
                    void* stream) {
  with_statistic(problem.dtype, [&](auto value) {
    using Value = decltype(value);
    launch(running_kernel<Value>, ceil_div(problem.channels, kThreads), kThreads, 0, stream,
           static_cast<const Value*>(running.mean), static_cast<const Value*>(running.var), eps,
           problem.channels, static_cast<Value*>(statistics));
  });
}

void launch_normalize(const Problem& problem, const void* statistics, void* output, void* stream) {
  const Loads loads = widest_loads(problem, {problem.input, problem.residual, output});
  const Partition p = make_partition(problem, loads);
  with_access(problem, loads, [&](auto access) {
    launch(normalize_kernel<decltype(access)>, p.blocks(), p.threads(), 0, stream, problem, p,
           statistics, output);
  });
}

}  // namespace memsave_ext::batch_norm
