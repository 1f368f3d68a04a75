// What runs kernels: each thread of a block is a fiber, and blocks run one after the other. Stops
// the program, with a sentence, where a kernel breaks a rule of CUDA.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <vector>

#include "order.h"

struct uint3 {
  unsigned x, y, z;
};

struct dim3 {
  unsigned x, y, z;

  constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};

// Of the thread that runs.
extern uint3 threadIdx, blockIdx;
extern dim3 blockDim, gridDim;

namespace emulation {

// A place in a source, by which barriers are told apart.
struct Place {
  const char* file;
  int line;

  static Place here(const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
    return {file, line};
  }
};

// ---- What threads of a kernel call --------------------------------------------------------------

// Whether all threads gave true.
bool block_barrier(Place place, bool value = true);
void warp_barrier(Place place, uint32_t mask);
// What lane ^ distance gives.
uint64_t shuffle(Place place, uint32_t mask, uint64_t value, int distance);
void require_launch_bounds(unsigned threads, unsigned min_blocks = 0);
void* static_shared(const void* key, size_t bytes, size_t alignment);
void* dynamic_shared();

// Of a __shared__ variable. `Key` is a type for each of them: that of a lambda written there.
template <typename T, typename Key>
T& shared_variable(Key) {
  static const char key = 0;
  return *static_cast<T*>(static_shared(&key, sizeof(T), alignof(T)));
}

// ---- What the host calls ------------------------------------------------------------------------

using KernelPointer = void (*)();

// As cudaFuncSetAttribute does, from then on.
void allow_dynamic_shared(KernelPointer kernel, size_t bytes);
constexpr size_t kMostSharedBytes = size_t{227} << 10;  // of sm_90

constexpr unsigned kMostThreads = 1024;
constexpr size_t kSharedUnasked = size_t{48} << 10;

// Without the checks of run(). `most_static` is what the kernel may declare itself.
void run_blocks(dim3 grid, dim3 block, size_t shared_bytes, size_t most_static,
                const std::function<void()>& thread);

void run(KernelPointer kernel, dim3 grid, dim3 block, size_t shared_bytes, size_t argument_bytes,
         const std::function<void()>& thread);

// kernel<<<grid, block, shared_bytes, stream>>>, to be called with the arguments.
template <typename... Parameters>
auto launch(void (*kernel)(Parameters...), dim3 grid, dim3 block, size_t shared_bytes, void*) {
  return [=](Parameters... parameters) {
    const std::function<void()> thread = [&] { kernel(parameters...); };
    run(reinterpret_cast<KernelPointer>(kernel), grid, block, shared_bytes,
        (sizeof(Parameters) + ... + 0), thread);
  };
}

struct Launched {
  KernelPointer kernel;
  unsigned threads;  // the most of a block
};
// Every kernel that was launched, once.
const std::vector<Launched>& launched();

}  // namespace emulation
