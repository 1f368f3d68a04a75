// Steps on CUDA: launches the kernels for items, and advances step counts.
#include <algorithm>
#include <vector>

#include "adam/cuda/launch.cuh"
#include "adam/kernels.h"

namespace memsave_ext::adam {
namespace {

struct Steps {
  static constexpr int kCount = 250;

  float* step[kCount];
  const float* skips[kCount];
  int count;
};

static_assert(sizeof(Steps) <= 4096, "what every device takes as a kernel's arguments");

__global__ void __launch_bounds__(kThreads) advance_kernel(const __grid_constant__ Steps steps) {
  const int i = blockIdx.x * kThreads + threadIdx.x;
  if (i >= steps.count || (steps.skips[i] != nullptr && *steps.skips[i] != 0)) return;
  *steps.step[i] += 1;
}

void launch_advance(float* const* steps, const float* const* skips, int64_t count, void* stream) {
  for (int64_t first = 0; first < count; first += Steps::kCount) {
    Steps some;
    some.count = static_cast<int>(count - first < Steps::kCount ? count - first : Steps::kCount);
    for (int i = 0; i < some.count; ++i) {
      some.step[i] = steps[first + i];
      some.skips[i] = skips != nullptr ? skips[first + i] : nullptr;
    }
    launch(advance_kernel, (some.count + kThreads - 1) / kThreads, kThreads, 0, stream, some);
  }
}

template <int states = 0>
const StepKernels& steps_of(StateFormat format) {
  if constexpr (states + 1 < kStateFormats) {
    if (static_cast<int>(format) != states) return steps_of<states + 1>(format);
  }
  return steps_with<static_cast<StateFormat>(states)>();
}

void launch_steps(const Item* items, int64_t count, void* stream) {
  std::vector<StepKernel> kernels(count), distinct;
  for (int64_t i = 0; i < count; ++i) {
    kernels[i] = steps_of(items[i].state_format)[items[i].combination()];
    if (std::find(distinct.begin(), distinct.end(), kernels[i]) == distinct.end()) {
      distinct.push_back(kernels[i]);
    }
  }
  for (const StepKernel kernel : distinct) {
    const auto launch_batch = [&](const Batch& batch, uint32_t chunks) {
      launch(kernel, chunks, kThreads, 0, stream, batch);
    };
    Batcher batcher(launch_batch);
    for (int64_t i = 0; i < count; ++i) {
      if (kernels[i] == kernel) batcher.add(items[i]);
    }
    batcher.finish();
  }
}

}  // namespace

const Kernels cuda_kernels = {launch_steps, launch_advance, launch_measure, measure_workspace};

}  // namespace memsave_ext::adam
