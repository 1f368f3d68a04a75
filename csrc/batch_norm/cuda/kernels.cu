// The table of CUDA's kernels, and which launches each operation consists of.
#include "batch_norm/cuda/launch.cuh"
#include "batch_norm/cuda/reduce.cuh"

namespace memsave_ext::batch_norm {
namespace {

void run_moments(const Problem& problem, void* out, void* stream) {
  launch_moments(problem, {out, false, 0, {}, problem.channels, problem.count()}, stream);
}

void run_forward(const Problem& problem, double eps, const Running& running, void* statistics,
                 void* output, void* stream) {
  const Summary to = {statistics, true, eps, running, problem.channels, problem.count()};
  if (launch_forward_onchip(problem, to, output, stream)) return;
  launch_moments(problem, to, stream);
  launch_normalize(problem, statistics, output, stream);
}

void run_backward(const Problem& problem, const void* statistics, bool training, const void* grad,
                  void* grad_input, void* grad_residual, void* grad_weight, void* grad_bias,
                  void* stream) {
  const bool needs_means = training && grad_input != nullptr;
  ChannelSums to = {grad_bias, grad_weight, nullptr, problem.channels, problem.count()};
  if (needs_means &&
      launch_backward_onchip(problem, statistics, grad, grad_input, grad_residual, to, stream)) {
    return;
  }
  if (needs_means) to.means = Workspace(problem).vectors;
  if (needs_means || grad_weight != nullptr || grad_bias != nullptr) {
    launch_backward_sums(problem, statistics, grad, to, stream);
  }
  if (grad_input != nullptr || grad_residual != nullptr) {
    launch_backward_input(problem, statistics, to.means, grad, grad_input, grad_residual, stream);
  }
}

void run_backward_sums(const Problem& problem, const void* statistics, const void* grad, void* sums,
                       void* stream) {
  char* dots = static_cast<char*>(sums) + problem.channels * statistic_bytes(problem.dtype);
  launch_backward_sums(problem, statistics, grad,
                       {sums, dots, nullptr, problem.channels, problem.count()}, stream);
}

size_t workspace_bytes(const Problem& problem) {
  size_t bytes = 0;
  const auto need = [&](const Loads& loads) {
    bytes = std::max(bytes, Workspace::bytes(problem, make_partition(problem, loads)));
  };
  for (const int vector : vectors(problem.dtype)) {
    if (length_of(problem) % vector == 0) need({vector});
  }
  if (can_mask(problem)) need({*vectors(problem.dtype).begin(), true});
  return bytes;
}

}  // namespace

const Kernels cuda_kernels = {run_moments,           run_forward,     launch_running,
                              launch_normalize,      run_backward,    run_backward_sums,
                              launch_backward_input, workspace_bytes, true};

}  // namespace memsave_ext::batch_norm
