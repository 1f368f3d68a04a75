#include "device.h"

#include <cstdio>
#include <cstdlib>

#include "fibers.h"

uint3 threadIdx, blockIdx;
dim3 blockDim, gridDim;

namespace emulation {
namespace {

constexpr unsigned kWarp = 32;

enum class State { kRuns, kInBlockBarrier, kInWarp, kEnded };

// What a thread waits with. Plain arrays: this file is not seen by ThreadSanitizer, while members
// of std::vector may be shared with files that are.
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

std::function<void()> body;
std::unique_ptr<Fiber> fibers[kMostThreads];
Thread threads[kMostThreads];
unsigned thread_count, running;
size_t dynamic_bytes, static_bytes, most_static_bytes;
void* dynamic_memory;
SharedVariable variables[32];
int variable_count;
char* orders;  // of the block's memory accesses, and of each warp's: names for release and acquire
char kernel_begin, kernel_end;

void describe(unsigned thread) {
  const Thread& t = threads[thread];
  static const char* const kStates[] = {"runs", "waits in a block's barrier", "waits for its warp",
                                        "has ended"};
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

// ---- One block ----------------------------------------------------------------------------------

void resume(unsigned thread) {
  running = thread;
  threadIdx = {thread, 0, 0};
  fibers[thread]->resume();
}

bool same(const Place& a, const Place& b) {
  return a.line == b.line && (a.file == b.file || strcmp(a.file, b.file) == 0);
}

unsigned warp_end(unsigned warp) {
  const unsigned end = (warp + 1) * kWarp;
  return end < thread_count ? end : thread_count;
}

bool take_part(const Thread& a, const Thread& b) {
  return b.state == State::kInWarp && a.mask == b.mask && same(a.place, b.place);
}

// None of the warp runs. Whether all of the mask of a lane that waits for its warp are there: the
// first of them looks at all, the others at the first.
void check_lanes(unsigned warp, unsigned waiting) {
  const Thread& t = threads[waiting];
  const unsigned lane = waiting % kWarp;
  if ((t.mask >> lane & 1) == 0) fail_about(waiting, waiting, "a lane is not in its own mask");
  if ((t.mask >> (lane ^ static_cast<unsigned>(t.distance)) & 1) == 0) {
    fail_about(waiting, waiting, "a lane reads one that is not in the mask");
  }
  const unsigned first = static_cast<unsigned>(__builtin_ctz(t.mask));
  for (unsigned i = first; i < (lane == first ? kWarp : first + 1); ++i) {
    const unsigned other = warp * kWarp + i;
    if ((t.mask >> i & 1) == 0) continue;
    if (other >= thread_count) fail_about(waiting, other, "a mask has lanes that the warp has not");
    if (!take_part(t, threads[other])) {
      fail_about(waiting, other, "a lane of the mask does not take part");
    }
  }
}

// Whether any of the warp runs now.
bool release_lanes(unsigned warp) {
  uint64_t given[kWarp];
  bool any = false;
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
    any = true;
  }
  return any;
}

// To where each lane waits or ends.
bool advance_warp(unsigned warp) {
  unsigned places[kWarp];
  const unsigned first = warp * kWarp, count = warp_end(warp) - first;
  permute(places, count);
  for (unsigned i = 0; i < count; ++i) {
    if (threads[first + places[i]].state == State::kRuns) resume(first + places[i]);
  }
  return release_lanes(warp);
}

// To where each thread waits for the block or has ended.
void advance_block() {
  unsigned ready[kMostThreads / kWarp];
  unsigned count = (thread_count + kWarp - 1) / kWarp;
  for (unsigned warp = 0; warp < count; ++warp) ready[warp] = warp;
  while (count > 0) {
    const unsigned i = pick(0, count);
    if (advance_warp(ready[i])) continue;
    --count;
    for (unsigned k = i; k < count; ++k) ready[k] = ready[k + 1];
  }
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
  static_bytes = 0;
  orders = static_cast<char*>(allocate(1 + kMostThreads / kWarp, 1));
  // Of shared memory each part is a block of the heap, of its own size: sanitizers see what lies
  // beside it.
  dynamic_memory = dynamic_bytes > 0 ? allocate(dynamic_bytes, 16) : nullptr;
  for (unsigned i = 0; i < thread_count; ++i) {
    if (!fibers[i]) fibers[i] = std::make_unique<Fiber>(body);
    fibers[i]->start();
    threads[i] = {};
  }
  do {
    advance_block();
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
  static_bytes += bytes;
  if (static_bytes > most_static_bytes) {
    fail(
        "a kernel declares %zu bytes of shared memory beside the %zu that are asked for, where %zu "
        "are left",
        static_bytes, dynamic_bytes, most_static_bytes);
  }
  variables[variable_count] = {key, allocate(bytes, alignment)};
  return variables[variable_count++].memory;
}

void* dynamic_shared() { return dynamic_memory; }

// ---- What the host calls ------------------------------------------------------------------------

void run_blocks(dim3 grid, dim3 block, size_t dynamic, size_t most_static,
                const std::function<void()>& thread) {
  gridDim = grid;
  blockDim = block;
  thread_count = block.x;
  dynamic_bytes = dynamic;
  most_static_bytes = most_static;
  body = [&] {
    acquire(&kernel_begin);
    thread();
    release(&kernel_end);
    threads[running].state = State::kEnded;
  };
  std::vector<unsigned> places(grid.x);
  permute(places.data(), grid.x);
  release(&kernel_begin);
  for (const unsigned place : places) {
    blockIdx = {place, 0, 0};
    run_block();
  }
  acquire(&kernel_end);
}

}  // namespace emulation
