#include <algorithm>
#include <mutex>

#include "device.h"

namespace emulation {
namespace {

struct Allowed {
  KernelPointer kernel;
  size_t bytes;
};

std::vector<Allowed> allowed;
std::vector<Launched> kernels;
std::mutex one_at_a_time;

// The limits hold for what a kernel declares and what is asked for together: 48 KiB, unless it was
// allowed more.
size_t most_static_shared(KernelPointer kernel, size_t dynamic) {
  size_t all = kSharedUnasked, most = kSharedUnasked;
  for (const Allowed& one : allowed) {
    if (one.kernel == kernel) all = kMostSharedBytes, most = one.bytes;
  }
  if (dynamic > most) fail("%zu bytes of shared memory, where %zu are allowed", dynamic, most);
  return all - (all == kSharedUnasked ? dynamic : most);
}

}  // namespace

void allow_dynamic_shared(KernelPointer kernel, size_t bytes) {
  if (bytes > kMostSharedBytes) fail("%zu bytes of shared memory are asked for", bytes);
  for (Allowed& one : allowed) {
    if (one.kernel == kernel) return void(one.bytes = bytes);
  }
  allowed.push_back({kernel, bytes});
}

const std::vector<Launched>& launched() { return kernels; }

void run(KernelPointer kernel, dim3 grid, dim3 block, size_t dynamic, size_t argument_bytes,
         const std::function<void()>& thread) {
  const std::lock_guard<std::mutex> lock(one_at_a_time);
  if (kernel == nullptr) fail("a null kernel is launched");
  if (grid.x == 0 || grid.x > 0x7fffffffu) fail("%u blocks", grid.x);
  if (block.x == 0 || block.x > kMostThreads) fail("%u threads", block.x);
  if (argument_bytes > 4096) fail("%zu bytes of arguments", argument_bytes);
  run_blocks(grid, block, dynamic, most_static_shared(kernel, dynamic), thread);
  for (Launched& one : kernels) {
    if (one.kernel != kernel) continue;
    one.threads = std::max(one.threads, block.x);
    return;
  }
  kernels.push_back({kernel, block.x});
}

}  // namespace emulation
