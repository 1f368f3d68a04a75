// Mean and sum of squared deviations of every channel, from sums over its chunks.
#include "batch_norm/cuda/launch.cuh"
#include "batch_norm/cuda/reduce.cuh"

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

}  // namespace memsave_ext::batch_norm
