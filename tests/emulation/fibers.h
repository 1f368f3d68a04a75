// Fibers: the threads of a block, which take turns on one thread of the host.
#pragma once

#include <cstddef>
#include <functional>

namespace emulation {

class Fiber {
 public:
  // What it runs in every turn after start(), until that returns.
  explicit Fiber(const std::function<void()>& body);
  ~Fiber();
  Fiber(const Fiber&) = delete;
  Fiber& operator=(const Fiber&) = delete;

  // Makes a fiber that has ended, or is new, ready for another run.
  void start();
  void resume();  // called by the host: until the fiber yields or ends
  void yield();   // called by the fiber

 private:
  static void enter(Fiber* self);
  void allocate_stack();

  const std::function<void()>& body_;
  char* stack_ = nullptr;
  void* own_ = nullptr;  // stack pointers of who does not run
  void* host_ = nullptr;
  [[maybe_unused]] void* as_thread_ = nullptr;  // of ThreadSanitizer
  [[maybe_unused]] void* host_thread_ = nullptr;
};

// Order between memory accesses, as ThreadSanitizer is told of it: what was done before release(at)
// comes before what is done after acquire(at).
void release(void* at);
void acquire(void* at);

// Memory of which ThreadSanitizer is not told that it was written when it was allocated or freed.
// Filled with what is no number, or, for MemorySanitizer, not initialised.
void* allocate(size_t bytes, size_t alignment);
void deallocate(void* memory);

}  // namespace emulation
