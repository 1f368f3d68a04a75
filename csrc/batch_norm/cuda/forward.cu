// Forward: the moments of every channel, from sums over its chunks; then
// output = activate(normalize(input) + residual) from statistics.
#include "batch_norm/cuda/launch.cuh"
#include "batch_norm/cuda/reduce.cuh"
#include "batch_norm/cuda/values.cuh"

namespace memsave_ext::batch_norm {
namespace {

// Writes the sums of every chunk to partials (C, chunks), and to origins (C) the values from which
// their deviations are counted.
template <typename A>
__global__ void __launch_bounds__(kThreads)
    chunk_moments_kernel(const void* input, Partition p, double2* partials, double* origins) {
  typename A::Walk walk(p, blockIdx.x, threadIdx.x);
  const Channels channels = walk.channels(p);
  typename A::Vec origin = {};
  if (walk.has_channel(p)) origin = load_first<A>(input, p, channels);
  ThreadMoments<A> moments;
  while (walk.more()) {
    Place places[A::kUnroll];
    typename A::Vec x[A::kUnroll];
    take(walk, p, places);
    load_all<A>(input, p, places, x);
#pragma unroll
    for (int u = 0; u < A::kUnroll; ++u) {
      if (places[u].there()) moments.add(x[u], places[u].mask);
    }
  }

  double2 sums[A::kChannels];
  moments.fold_about(origin, sums);
  if (!sum_channels<A>(sums, p, walk) || !walk.has_channel(p)) return;
#pragma unroll
  for (int c = 0; c < A::kChannels; ++c) {
    if (!channels.has(c)) continue;
    const int64_t channel = channels.first + c;
    partials[channel * p.chunks + walk.chunk] = sums[c];
    if (walk.chunk == 0) origins[channel] = origin[c];
  }
}

// Adds up the chunks of channel blockIdx.x.
template <typename Value>
__global__ void channel_moments_kernel(const double2* partials, int64_t chunks,
                                       const double* origins, Summary to) {
  const double2 sums = sum_chunks(partials, chunks);
  if (threadIdx.x == 0) write_moments<Value>(to, blockIdx.x, sums, origins[blockIdx.x]);
}

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

void launch_moments(const Problem& problem, const Summary& to, void* stream) {
  const Loads loads = widest_loads(problem, {problem.input});
  const Partition p = make_partition(problem, loads);
  const Workspace workspace(problem);
  double* origins = static_cast<double*>(workspace.vectors);
  with_access(problem, loads, [&](auto access) {
    launch(chunk_moments_kernel<decltype(access)>, p.blocks(), p.threads(), 0, stream,
           problem.input, p, workspace.partials, origins);
  });
  with_statistic(problem.dtype, [&](auto value) {
    launch(channel_moments_kernel<decltype(value)>, problem.channels, merging_threads(p), 0, stream,
           workspace.partials, p.chunks, origins, to);
  });
}

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
