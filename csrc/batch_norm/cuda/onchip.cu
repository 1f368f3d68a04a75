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
  constexpr int kUnroll = A::kUnroll;
  Vec* kept = reinterpret_cast<Vec*>(kept_values);
  Walk<false> walk(p, blockIdx.x, threadIdx.x);
  const Vec origin = load<Vec>(problem.input, walk.first(p));
  ThreadMoments<A> moments;
  while (walk.more()) {
    Vec x[kUnroll];
    int item[kUnroll];
    const int64_t offset = walk.offset;
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      item[u] = walk.more() ? walk.item : -1;
      // Loading twice costs less than a branch.
      x[u] = load<Vec>(problem.input, item[u] >= 0 ? walk.offset : offset);
      walk.next(p);
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      if (item[u] < 0) continue;
      kept[item[u]] = x[u];
      moments.add(x[u]);
    }
  }
  double2 sums[1];
  moments.fold_about(origin, sums);
  sums[0] = sum_block(sums[0]);
  Pair<Value> statistics = {};
  if (threadIdx.x == 0) {
    statistics = write_moments<Value>(to, walk.column, sums[0], origin[0]);
  }
  const Affine<A> affine(problem, broadcast(statistics), walk.column);

  for (walk = Walk<false>(p, blockIdx.x, threadIdx.x); walk.more(); walk.next(p)) {
    Vec residual;
    if (problem.residual) residual = load<Vec>(problem.residual, walk.offset);
    store(output, walk.offset, output_of(problem, affine, kept[walk.item], residual));
  }
}

template <typename A>
__global__ void __launch_bounds__(kMostThreads, 1)
    backward_onchip_kernel(Problem problem, Partition p, const void* statistics, const void* grad,
                           void* grad_input, void* grad_residual, ChannelSums to) {
  using Vec = typename A::Vec;
  using Value = typename A::Value;
  constexpr int kUnroll = A::kUnroll / 2;
  Vec* kept_x = reinterpret_cast<Vec*>(kept_values);
  Vec* kept_grad = kept_x + p.items;
  Vec* kept_residual = kept_grad + p.items;
  const bool with_residual = masks_with_residual(problem);
  Walk<false> walk(p, blockIdx.x, threadIdx.x);
  const Affine<A> affine(problem, statistics, walk.column);
  ThreadSums<A> of_thread;
  while (walk.more()) {
    Vec x[kUnroll], dy[kUnroll], residual[kUnroll];
    int item[kUnroll];
    int64_t offset[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      item[u] = walk.more() ? walk.item : -1;
      offset[u] = item[u] >= 0 ? walk.offset : offset[0];
      x[u] = load<Vec>(problem.input, offset[u]);
      dy[u] = load<Vec>(grad, offset[u]);
      walk.next(p);
    }
    load_residual(with_residual, problem, offset, residual);
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      if (item[u] < 0) continue;
      kept_x[item[u]] = x[u];
      kept_grad[item[u]] = dy[u];
      if (with_residual) kept_residual[item[u]] = residual[u];
      add_gradients(problem, affine, dy[u], x[u], residual[u], of_thread);
    }
  }
  double2 sums[1];
  of_thread.fold(sums);
  sums[0].y *= affine.invstd[0];
  sums[0] = sum_block(sums[0]);
  Pair<Value> means = {};
  if (threadIdx.x == 0) means = write_sums<Value>(to, walk.column, sums[0]);
  means = broadcast(means);
  const GradientMeans<A> of_channel = {{means.first}, {means.second}};

  for (walk = Walk<false>(p, blockIdx.x, threadIdx.x); walk.more(); walk.next(p)) {
    Vec residual;
    if (with_residual) residual = kept_residual[walk.item];
    write_gradients(problem, affine, of_channel, kept_grad[walk.item], kept_x[walk.item], residual,
                    walk.offset, grad_input, grad_residual);
  }
}

int64_t most_shared_bytes() {
  int device = 0, bytes = 0;
  check_cuda(cudaGetDevice(&device));
  check_cuda(cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device));
  return bytes - 1024;  // leaves room for what the kernels declare statically
}

struct Fit {
  bool fits;
  int threads;
  size_t bytes;
};

// Decides whether a channel of so many tensors fits into shared memory and is worth a block, and
// with how many threads.
Fit fit_onchip(const Problem& problem, int tensors) {
  constexpr int64_t kBusy = 128;  // roughly the blocks that keep a device busy
  // Bytes of a channel up to which two launches cost more than idle multiprocessors.
  constexpr int64_t kSmall = int64_t{1} << 15;
  const int64_t bytes = problem.count() * item_size(problem.dtype) * tensors;
  if (is_channels_last(problem)) return {false, 0, 0};
  if (problem.channels < kBusy && bytes > kSmall) return {false, 0, 0};
  const int64_t most = most_shared_bytes();
  if (bytes > most) return {false, 0, 0};
  // A multiprocessor has registers for about 1024 threads.
  const int64_t resident = std::min(problem.channels / kBusy, most / bytes);
  const int threads = resident >= 8 ? 128 : resident >= 4 ? 256 : kMostThreads;
  return {true, threads, static_cast<size_t>(bytes)};
}

template <typename... Parameters, typename... Arguments>
void launch_fit(void (*kernel)(Parameters...), const Problem& problem, const Fit& fit, void* stream,
                const Arguments&... arguments) {
  if (fit.bytes > (size_t{48} << 10)) {  // more than a kernel gets by default
    // Allows the most, not fit.bytes: another host thread with another shape could lower the limit
    // again before the launch.
    check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                    static_cast<int>(most_shared_bytes())));
  }
  launch(kernel, problem.channels, fit.threads, fit.bytes, stream, arguments...);
}

}  // namespace

bool launch_forward_onchip(const Problem& problem, const Summary& to, void* output, void* stream) {
  const Fit fit = fit_onchip(problem, 1);
  if (!fit.fits) return false;
  const int vector = widest_vector(problem, {problem.input, problem.residual, output});
  const Partition p = make_whole(problem, vector, fit.threads);
  with_vector<false>(problem.dtype, vector, [&](auto access) {
    launch_fit(forward_onchip_kernel<decltype(access)>, problem, fit, stream, problem, p, to,
               output);
  });
  return true;
}

bool launch_backward_onchip(const Problem& problem, const void* statistics, const void* grad,
                            void* grad_input, void* grad_residual, const ChannelSums& to,
                            void* stream) {
  const Fit fit = fit_onchip(problem, masks_with_residual(problem) ? 3 : 2);
  if (!fit.fits) return false;
  const int vector =
      widest_vector(problem, {problem.input, problem.residual, grad, grad_input, grad_residual});
  const Partition p = make_whole(problem, vector, fit.threads);
  with_vector<false>(problem.dtype, vector, [&](auto access) {
    launch_fit(backward_onchip_kernel<decltype(access)>, problem, fit, stream, problem, p,
               statistics, grad, grad_input, grad_residual, to);
  });
  return true;
}

}  // namespace memsave_ext::batch_norm
