// Gradients. Two sums are taken over each chunk, and from these over each channel; then one pass
// computes the gradient of the input from the channel's sums.
#include "batch_norm/cuda/launch.cuh"
#include "batch_norm/cuda/reduce.cuh"
#include "batch_norm/cuda/values.cuh"

namespace memsave_ext::batch_norm {
namespace {

// Writes the two sums of every chunk to partials (C, chunks).
template <typename A>
__global__ void __launch_bounds__(kThreads)
    chunk_sums_kernel(Problem problem, Partition p, const void* statistics, const void* grad,
                      double2* partials) {
  using Vec = typename A::Vec;
  using Value = typename A::Value;
  constexpr int kUnroll = A::kUnroll / 2;  // each step loads from two tensors
  typename A::Walk walk(p, blockIdx.x, threadIdx.x);
  const Channels channels = walk.channels(p);
  double2 sums[A::kChannels] = {};
  if (walk.more()) {
    const Affine<A> affine(problem, statistics, channels);
    const bool with_residual = masks_with_residual(problem);
    ThreadSums<A> of_thread;
    while (walk.more()) {
      Place places[kUnroll];
      Vec x[kUnroll], dy[kUnroll], residual[kUnroll];
      take(walk, p, places);
      load_all<A>(problem.input, p, places, x);
      load_all<A>(grad, p, places, dy);
      load_residual<A>(with_residual, problem, p, places, residual);
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        if (!places[u].there()) continue;
        add_gradients(problem, affine, dy[u], x[u], residual[u], places[u].mask, of_thread);
      }
    }
    of_thread.fold(sums);
#pragma unroll
    for (int c = 0; c < A::kChannels; ++c) sums[c].y *= affine.invstd[c];
  }
  if (!sum_channels<A>(sums, p, walk) || !walk.has_channel(p)) return;
#pragma unroll
  for (int c = 0; c < A::kChannels; ++c) {
    if (channels.has(c)) partials[(channels.first + c) * p.chunks + walk.chunk] = sums[c];
  }
}

// Adds up the chunks of channel blockIdx.x.
template <typename Value>
__global__ void channel_sums_kernel(const double2* partials, int64_t chunks, ChannelSums to) {
  const double2 sums = sum_chunks(partials, chunks);
  if (threadIdx.x == 0) write_sums<Value>(to, blockIdx.x, sums);
}

// That a multiprocessor must have room for; 0: any number.
template <typename A>
constexpr int kInputBlocks = vector::kIsBlackwell && sizeof(typename A::Element) == 8 ? 4 : 0;

template <typename A>
__global__ void __launch_bounds__(kThreads, kInputBlocks<A>)
    backward_input_kernel(Problem problem, Partition p, const void* statistics, const void* means,
                          const void* grad, void* grad_input, void* grad_residual) {
  using Vec = typename A::Vec;
  using Value = typename A::Value;
  constexpr int kUnroll = A::kUnroll / 2;
  // Takes the blocks in reverse: what the sums have read last is still in the cache.
  typename A::Walk walk(p, gridDim.x - 1 - blockIdx.x, threadIdx.x);
  if (!walk.more()) return;
  const Channels channels = walk.channels(p);
  const Affine<A> affine(problem, statistics, channels);
  const Value* values = static_cast<const Value*>(means);
  GradientMeans<A> of_channel;
  load_channels<A, Value>(values, channels, Value(0), of_channel.grad);
  load_channels<A, Value>(values == nullptr ? nullptr : values + problem.channels, channels,
                          Value(0), of_channel.dot);
  const bool with_residual = masks_with_residual(problem);
  while (walk.more()) {
    Place places[kUnroll];
    Vec x[kUnroll], dy[kUnroll], residual[kUnroll];
    take(walk, p, places);
    load_all<A>(problem.input, p, places, x);
    load_all<A>(grad, p, places, dy);
    load_residual<A>(with_residual, problem, p, places, residual);
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      if (!places[u].there()) continue;
      write_gradients(problem, affine, of_channel, dy[u], x[u], residual[u], places[u], grad_input,
                      grad_residual);
    }
  }
}

}  // namespace

void launch_backward_sums(const Problem& problem, const void* statistics, const void* grad,
                          const ChannelSums& to, void* stream) {
  const Loads loads = widest_loads(problem, {problem.input, problem.residual, grad});
  const Partition p = make_partition(problem, loads);
  double2* partials = Workspace(problem).partials;
  with_access(problem, loads, [&](auto access) {
    launch(chunk_sums_kernel<decltype(access)>, p.blocks(), p.threads(), 0, stream, problem, p,
           statistics, grad, partials);
  });
  with_statistic(problem.dtype, [&](auto value) {
    launch(channel_sums_kernel<decltype(value)>, problem.channels, merging_threads(p), 0, stream,
           partials, p.chunks, to);
  });
}

void launch_backward_input(const Problem& problem, const void* statistics, const void* means,
                           const void* grad, void* grad_input, void* grad_residual, void* stream) {
  const Loads loads =
      widest_loads(problem, {problem.input, problem.residual, grad, grad_input, grad_residual});
  const Partition p = make_partition(problem, loads);
  with_access(problem, loads, [&](auto access) {
    launch(backward_input_kernel<decltype(access)>, p.blocks(), p.threads(), 0, stream, problem, p,
           statistics, means, grad, grad_input, grad_residual);
  });
}

}  // namespace memsave_ext::batch_norm
