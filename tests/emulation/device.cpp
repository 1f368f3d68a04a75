#include "device.h"

#include <cstdarg>
#include <cstdio>
#include <cstdlib>

#include <unistd.h>

#include "fibers.h"

uint3 threadIdx, blockIdx;
dim3 blockDim, gridDim;

namespace emulation {
namespace {

constexpr unsigned kWarp = 32, kMostThreads = 1024;
constexpr size_t kSharedUnasked = size_t{48} << 10;

enum class State { kRuns, kInBlockBarrier, kInWarp, kEnded };

// What a thread waits with. Plain arrays: this file is not seen by ThreadSanitizer, while members of
// std::vector may be shared with files that are.
struct Thread {
  State state;
  Place place;
  bool value;  // given to a vote, then its result
  uint32_t mask;
  uint64_t shuffled;  // given, then received
  int distance;
};

struct SharedVariable {
  const void* key;
  void* memory;
};

struct Choice {
  Order order = Order::kForward;
  uint64_t state = 0;

  unsigned below(unsigned count) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    return static_cast<unsigned>((state >> 33) % count);
  }
  // The i-th of `count`, for i from 0; random: any.
  unsigned pick(unsigned i, unsigned count) {
    return order == Order::kForward ? i : order == Order::kReverse ? count - 1 - i : below(count);
  }
  void permute(unsigned* places, unsigned count) {
    for (unsigned i = 0; i < count; ++i) places[i] = order == Order::kReverse ? count - 1 - i : i;
    if (order != Order::kRandom) return;
    for (unsigned i = count; i > 1; --i) std::swap(places[i - 1], places[below(i)]);
  }
};

Choice choice;
std::function<void()> body;
std::unique_ptr<Fiber> fibers[kMostThreads];
Thread threads[kMostThreads];
unsigned thread_count, running;
size_t dynamic_bytes, shared_bytes;
void* dynamic_memory;
SharedVariable variables[32];
int variable_count;
char* orders;  // of the block's memory accesses, and of each warp's: names for release and acquire
char kernel_end;

void describe(unsigned thread) {
  const Thread& t = threads[thread];
  static const char* const kStates[] = {"runs", "waits in a block's barrier",
                                        "waits for its warp", "has ended"};
  fprintf(stderr, "  thread %u %s", thread, kStates[static_cast<int>(t.state)]);
  if (t.state == State::kInBlockBarrier || t.state == State::kInWarp) {
    fprintf(stderr, " at %s:%d", t.place.file, t.place.line);
  }
  fputc('\n', stderr);
}

[[noreturn]] void fail_about(unsigned one, unsigned other, const char* what) {
  describe(one);
  if (other < thread_count) describe(other);
  fail("block %u of %u: %s", blockIdx.x, gridDim.x, what);
}

void* allocate_shared(size_t bytes, size_t alignment) {
  shared_bytes += bytes;
  if (shared_bytes > (dynamic_bytes > kSharedUnasked ? kMostSharedBytes : kSharedUnasked)) {
    fail("a block takes %zu bytes of shared memory", shared_bytes);
  }
  // A block of the heap for each, of its own size: sanitizers see what lies beside it.
  void* memory = allocate(bytes, alignment);
#ifndef EMULATION_MEMORY
  memset(memory, 0xff, bytes);  // not a number
#endif
  return memory;
}

// ---- One block ----------------------------------------------------------------------------------

void resume(unsigned thread) {
  running = thread;
  threadIdx = {thread, 0, 0};
  fibers[thread]->resume();
}

bool same(const Place& a, const Place& b) { return a.line == b.line && strcmp(a.file, b.file) == 0; }

unsigned warp_end(unsigned warp) {
  const unsigned end = (warp + 1) * kWarp;
  return end < thread_count ? end : thread_count;
}

bool any_runs(unsigned warp) {
  for (unsigned i = warp * kWarp; i < warp_end(warp); ++i) {
    if (threads[i].state == State::kRuns) return true;
  }
  return false;
}

// None of the warp runs. Whether all of the mask of a lane that waits for its warp are there.
void check_lanes(unsigned warp, unsigned waiting) {
  const Thread& t = threads[waiting];
  if ((t.mask >> (waiting % kWarp) & 1) == 0) {
    fail_about(waiting, waiting, "a lane is missing from its own mask");
  }
  for (unsigned lane = 0; lane < kWarp; ++lane) {
    if ((t.mask >> lane & 1) == 0) continue;
    const unsigned other = warp * kWarp + lane;
    if (other >= thread_count) fail_about(waiting, other, "a mask has lanes that the warp has not");
    const Thread& o = threads[other];
    if (o.state != State::kInWarp || o.mask != t.mask || !same(o.place, t.place)) {
      fail_about(waiting, other, "a lane of the mask does not take part");
    }
  }
  if ((t.mask >> ((waiting % kWarp) ^ static_cast<unsigned>(t.distance)) & 1) == 0) {
    fail_about(waiting, waiting, "a lane reads one that is not in the mask");
  }
}

void release_lanes(unsigned warp) {
  uint64_t given[kWarp];
  const unsigned first = warp * kWarp, end = warp_end(warp);
  for (unsigned i = first; i < end; ++i) {
    if (threads[i].state == State::kInWarp) check_lanes(warp, i);
    given[i - first] = threads[i].shuffled;
  }
  for (unsigned i = first; i < end; ++i) {
    Thread& t = threads[i];
    if (t.state != State::kInWarp) continue;
    t.shuffled = given[(i - first) ^ static_cast<unsigned>(t.distance)];
    t.state = State::kRuns;
  }
}

void advance_warp(unsigned warp) {
  unsigned places[kWarp];
  const unsigned first = warp * kWarp, count = warp_end(warp) - first;
  choice.permute(places, count);
  for (unsigned i = 0; i < count; ++i) {
    if (threads[first + places[i]].state == State::kRuns) resume(first + places[i]);
  }
  release_lanes(warp);
}

// Nothing runs any more. False where the block has ended.
bool release_block() {
  unsigned ended = 0, waiting = 0;
  bool all = true;
  for (unsigned i = 0; i < thread_count; ++i) {
    if (threads[i].state == State::kEnded) {
      ended = i;
    } else {
      waiting = i;
      all = all && threads[i].value;
    }
  }
  if (threads[waiting].state == State::kEnded) return false;
  if (threads[ended].state == State::kEnded) {
    fail_about(waiting, ended, "a thread has ended before a barrier that others wait in");
  }
  for (unsigned i = 0; i < thread_count; ++i) {
    if (!same(threads[i].place, threads[waiting].place)) {
      fail_about(waiting, i, "threads wait in different barriers");
    }
  }
  for (unsigned i = 0; i < thread_count; ++i) {
    threads[i].value = all;
    threads[i].state = State::kRuns;
  }
  return true;
}

void run_block() {
  variable_count = 0;
  shared_bytes = 0;
  orders = static_cast<char*>(allocate(1 + kMostThreads / kWarp, 1));
  dynamic_memory = dynamic_bytes > 0 ? allocate_shared(dynamic_bytes, 16) : nullptr;
  for (unsigned i = 0; i < thread_count; ++i) {
    if (!fibers[i]) fibers[i] = std::make_unique<Fiber>(body);
    fibers[i]->start();
    threads[i] = {};
  }
  const unsigned warps = (thread_count + kWarp - 1) / kWarp;
  do {
    unsigned ready[kMostThreads / kWarp];
    while (true) {
      unsigned count = 0;
      for (unsigned warp = 0; warp < warps; ++warp) {
        if (any_runs(warp)) ready[count++] = warp;
      }
      if (count == 0) break;
      advance_warp(ready[choice.pick(0, count)]);
    }
  } while (release_block());
  for (int i = 0; i < variable_count; ++i) deallocate(variables[i].memory);
  if (dynamic_memory != nullptr) deallocate(dynamic_memory);
  deallocate(orders);
}

void wait(State state, Place place) {
  Thread& t = threads[running];
  t.state = state;
  t.place = place;
  fibers[running]->yield();
}

}  // namespace

// ---- What threads of a kernel call --------------------------------------------------------------

bool block_barrier(Place place, bool value) {
  Thread& t = threads[running];
  t.value = value;
  release(orders);
  wait(State::kInBlockBarrier, place);
  acquire(orders);
  return t.value;
}

void warp_barrier(Place place, uint32_t mask) {
  Thread& t = threads[running];
  t.mask = mask;
  t.distance = 0;
  char* const order = orders + 1 + running / kWarp;
  release(order);
  wait(State::kInWarp, place);
  acquire(order);
}

uint64_t shuffle(Place place, uint32_t mask, uint64_t value, int distance) {
  Thread& t = threads[running];
  t.mask = mask;
  t.distance = distance;
  t.shuffled = value;
  wait(State::kInWarp, place);
  return t.shuffled;
}

void require_launch_bounds(unsigned most, unsigned) {
  if (thread_count > most) fail("%u threads, where the kernel's bound is %u", thread_count, most);
}

void* static_shared(const void* key, size_t bytes, size_t alignment) {
  for (int i = 0; i < variable_count; ++i) {
    if (variables[i].key == key) return variables[i].memory;
  }
  if (variable_count == 32) fail("more than 32 shared variables");
  variables[variable_count] = {key, allocate_shared(bytes, alignment)};
  return variables[variable_count++].memory;
}

void* dynamic_shared() { return dynamic_memory; }

// ---- What the host calls ------------------------------------------------------------------------

namespace {

struct Allowed {
  KernelPointer kernel;
  size_t bytes;
};

std::vector<Allowed> allowed;
std::vector<KernelPointer> kernels;

}  // namespace

const char* name(Order order) {
  return order == Order::kForward ? "forward" : order == Order::kReverse ? "reverse" : "random";
}

void use(Order order, uint64_t seed) { choice = {order, seed}; }

void fail(const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  fprintf(stderr, "emulation (%s): ", name(choice.order));
  vfprintf(stderr, format, arguments);
  fputc('\n', stderr);
  va_end(arguments);
  fflush(nullptr);
  _exit(1);
}

void allow_dynamic_shared(KernelPointer kernel, size_t bytes) {
  if (bytes > kMostSharedBytes) fail("%zu bytes of shared memory are asked for", bytes);
  for (Allowed& one : allowed) {
    if (one.kernel == kernel) return void(one.bytes = bytes);
  }
  allowed.push_back({kernel, bytes});
}

const std::vector<KernelPointer>& launched() { return kernels; }

void run(KernelPointer kernel, dim3 grid, dim3 block, size_t dynamic, size_t argument_bytes,
         const std::function<void()>& thread) {
  if (kernel == nullptr) fail("a null kernel is launched");
  if (grid.x == 0 || grid.x > 0x7fffffffu) fail("%u blocks", grid.x);
  if (block.x == 0 || block.x > kMostThreads) fail("%u threads", block.x);
  if (argument_bytes > 4096) fail("%zu bytes of arguments", argument_bytes);
  size_t most = kSharedUnasked;
  for (const Allowed& one : allowed) {
    if (one.kernel == kernel) most = one.bytes;
  }
  if (dynamic > most) fail("%zu bytes of shared memory, where %zu are allowed", dynamic, most);
  bool known = false;
  for (const KernelPointer one : kernels) known = known || one == kernel;
  if (!known) kernels.push_back(kernel);

  gridDim = grid;
  blockDim = block;
  thread_count = block.x;
  dynamic_bytes = dynamic;
  body = [&] {
    thread();
    release(&kernel_end);
    threads[running].state = State::kEnded;
  };
  std::vector<unsigned> places(grid.x);
  choice.permute(places.data(), grid.x);
  for (const unsigned place : places) {
    blockIdx = {place, 0, 0};
    run_block();
  }
  acquire(&kernel_end);
}

}  // namespace emulation
