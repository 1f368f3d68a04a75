// Forward and backward, channels first, with one block per channel. The channel's values stay in
// shared memory from the sums to the result, so that one kernel reads every tensor once. A thread
// reads back only values that it wrote itself.
#include "batch_norm/cuda/launch.cuh"
#include "batch_norm/cuda/reduce.cuh"
#include "batch_norm/cuda/values.cuh"

namespace memsave_ext::batch_norm {
namespace {

constexpr int kMostThreads = 512;

extern __shared__ uint4 kept_values[];

// Returns the first thread's value to all threads of the block.
template <typename Value>
__device__ __forceinline__ Pair<Value> broadcast(const Pair<Value>& value) {
  __shared__ Pair<Value> shared;
  if (threadIdx.x == 0) shared = value;
  __syncthreads();
  return shared;
}

template <typename A>
__global__ void __launch_bounds__(kMostThreads, 1)
    forward_onchip_kernel(Problem problem, Partition p, Summary to, void* output) {
  using Vec = typename A::Vec;
  using Value = typename A::Value;
  using Walk = typename A::Walk;
  constexpr int kUnroll = A::kUnroll;
  Vec* kept = reinterpret_cast<Vec*>(kept_values);
  Walk walk(p, blockIdx.x, threadIdx.x);
  const Channels channel = walk.channels(p);
  const Vec origin = load_first<A>(problem.input, p, channel);
  ThreadMoments<A> moments;
  while (walk.more()) {
    Place places[kUnroll];
    Vec x[kUnroll];
    take(walk, p, places);
    load_all<A>(problem.input, p, places, x);
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      if (!places[u].there()) continue;
      kept[places[u].item] = x[u];
      moments.add(x[u], places[u].mask);
    }
  }
  double2 sums[1];
  moments.fold_about(origin, sums);
  sums[0] = sum_block(sums[0]);
  Pair<Value> statistics = {};
  if (threadIdx.x == 0) {
    statistics = write_moments<Value>(to, channel.first, sums[0], origin[0]);
  }
  const Affine<A> affine(problem, broadcast(statistics), channel);

  for (walk = Walk(p, blockIdx.x, threadIdx.x); walk.more(); walk.next(p)) {
    const Place place[] = {walk.place(p)};
    if (!place->there()) continue;
    Vec residual[1];
    load_residual<A>(problem.residual != nullptr, problem, p, place, residual);
    store_at<A>(output, *place, output_of(problem, affine, kept[walk.item], *residual));
  }
}

template <typename A>
__global__ void __launch_bounds__(kMostThreads, 1)
    backward_onchip_kernel(Problem problem, Partition p, const void* statistics, const void* grad,
                           void* grad_input, void* grad_residual, ChannelSums to) {
  using Vec = typename A::Vec;
  using Value = typename A::Value;
  using Walk = typename A::Walk;
  constexpr int kUnroll = A::kUnroll / 2;
  Vec* kept_x = reinterpret_cast<Vec*>(kept_values);
  Vec* kept_grad = kept_x + p.items;
  Vec* kept_residual = kept_grad + p.items;
  const bool with_residual = masks_with_residual(problem);
  Walk walk(p, blockIdx.x, threadIdx.x);
  const Channels channel = walk.channels(p);
  const Affine<A> affine(problem, statistics, channel);
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
      const int item = places[u].item;
      kept_x[item] = x[u];
      kept_grad[item] = dy[u];
      if (with_residual) kept_residual[item] = residual[u];
      add_gradients(problem, affine, dy[u], x[u], residual[u], places[u].mask, of_thread);
    }
  }
  double2 sums[1];
  of_thread.fold(sums);
  sums[0].y *= affine.invstd[0];
  sums[0] = sum_block(sums[0]);
  Pair<Value> means = {};
  if (threadIdx.x == 0) means = write_sums<Value>(to, channel.first, sums[0]);
  means = broadcast(means);
  const GradientMeans<A> of_channel = {{means.first}, {means.second}};

  for (walk = Walk(p, blockIdx.x, threadIdx.x); walk.more(); walk.next(p)) {
    const Place place = walk.place(p);
    if (!place.there()) continue;
    Vec residual;
    if (with_residual) residual = kept_residual[walk.item];
    write_gradients(problem, affine, of_channel, kept_grad[walk.item], kept_x[walk.item], residual,
                    place, grad_input, grad_residual);
  }
}

// At least what the kernels declare statically. Limits hold for that and the dynamic part together.
constexpr int64_t kStaticBytes = 1024;

int64_t of_device(cudaDeviceAttr attribute) {
  int device = 0, value = 0;
  check_cuda(cudaGetDevice(&device));
  check_cuda(cudaDeviceGetAttribute(&value, attribute, device));
  return value;
}

int64_t most_shared_bytes() {
  return of_device(cudaDevAttrMaxSharedMemoryPerBlockOptin) - kStaticBytes;
}

struct Fit {
  bool fits;
  int threads;
  int64_t bytes;
};

// Decides whether a channel of so many tensors fits into shared memory and is worth a block, and
// with how many threads.
Fit fit_onchip(const Problem& problem, const Loads& loads, int tensors) {
  constexpr int64_t kBusy = 128;  // roughly the blocks that keep a device busy
  // Bytes of a channel up to which two launches cost more than idle multiprocessors.
  constexpr int64_t kSmall = int64_t{1} << 15;
  if (is_channels_last(problem)) return {false, 0, 0};
  const int64_t values = make_partition(problem, loads).items * loads.vector;
  const int64_t bytes = values * item_size(problem.dtype) * tensors;
  if (problem.channels < kBusy && bytes > kSmall) return {false, 0, 0};
  const int64_t most = most_shared_bytes();
  if (bytes > most) return {false, 0, 0};
  // A multiprocessor has registers for about 1024 threads.
  constexpr int64_t kThreadsAtOnce = 1024;
  const int64_t resident = std::min(problem.channels / kBusy, most / bytes);
  const int threads = resident >= 8 ? 128 : resident >= 4 ? 256 : kMostThreads;
  const Fit fit = {true, threads, bytes};
  if (bytes <= kSmall) return fit;
  // Some places for blocks stay empty in the last wave. Chunks leave none empty, and move memory
  // that takes as long as 1.3 times all of these (docs/gpu-notes.md).
  const int64_t at_once = std::min(most / bytes, kThreadsAtOnce / threads);
  const int64_t wave = of_device(cudaDevAttrMultiProcessorCount) * at_once;
  const int64_t places = ceil_div(problem.channels, wave) * wave;
  if (problem.channels > wave && 10 * places > 13 * problem.channels) return {false, 0, 0};
  return fit;
}

template <typename... Parameters, typename... Arguments>
void launch_fit(void (*kernel)(Parameters...), const Problem& problem, const Fit& fit, void* stream,
                const Arguments&... arguments) {
  constexpr int64_t kDefault = int64_t{48} << 10;  // what a kernel gets without being allowed more
  if (fit.bytes + kStaticBytes > kDefault) {
    // Allows the most, not fit.bytes: another host thread with another shape could lower the limit
    // again before the launch.
    check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                    static_cast<int>(most_shared_bytes())));
  }
  launch(kernel, problem.channels, fit.threads, static_cast<size_t>(fit.bytes), stream,
         arguments...);
}

}  // namespace

bool launch_forward_onchip(const Problem& problem, const Summary& to, void* output, void* stream) {
  const Loads loads = widest_loads(problem, {problem.input, problem.residual, output});
  const Fit fit = fit_onchip(problem, loads, 1);
  if (!fit.fits) return false;
  const Partition p = make_whole(problem, loads, fit.threads);
  with_loads<false>(problem.dtype, loads, [&](auto access) {
    launch_fit(forward_onchip_kernel<decltype(access)>, problem, fit, stream, problem, p, to,
               output);
  });
  return true;
}

bool launch_backward_onchip(const Problem& problem, const void* statistics, const void* grad,
                            void* grad_input, void* grad_residual, const ChannelSums& to,
                            void* stream) {
  const Loads loads =
      widest_loads(problem, {problem.input, problem.residual, grad, grad_input, grad_residual});
  const Fit fit = fit_onchip(problem, loads, masks_with_residual(problem) ? 3 : 2);
  if (!fit.fits) return false;
  const Partition p = make_whole(problem, loads, fit.threads);
  with_loads<false>(problem.dtype, loads, [&](auto access) {
    launch_fit(backward_onchip_kernel<decltype(access)>, problem, fit, stream, problem, p,
               statistics, grad, grad_input, grad_residual, to);
  });
  return true;
}

}  // namespace memsave_ext::batch_norm
