#include "fibers.h"

#include <sys/mman.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#ifdef EMULATION_ADDRESS
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif
#ifdef EMULATION_THREAD
#include <sanitizer/tsan_interface.h>
#endif

#ifndef __x86_64__
#error "The switch between fibers is written for x86-64."
#endif

// Saves what a called function must keep, and goes on where the other one was saved.
extern "C" void emulation_switch(void** from, void* to);
asm(R"(
.text
.type emulation_switch, @function
emulation_switch:
  push %rbp
  push %rbx
  push %r12
  push %r13
  push %r14
  push %r15
  mov %rsp, (%rdi)
  mov %rsi, %rsp
  pop %r15
  pop %r14
  pop %r13
  pop %r12
  pop %rbx
  pop %rbp
  ret
.type emulation_enter, @function
emulation_enter:
  mov %r12, %rdi
  call *%rbx
  ud2
)");
extern "C" void emulation_enter();

namespace emulation {
namespace {

constexpr size_t kStack = size_t{256} << 10;

}  // namespace

void Fiber::allocate_stack() {
#ifdef EMULATION_THREAD
  as_thread_ = __tsan_create_fiber(0);
#endif
  constexpr size_t kGuard = 4096;
  void* pages = mmap(nullptr, kStack, PROT_READ | PROT_WRITE,
                     MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (pages == MAP_FAILED || mprotect(pages, kGuard, PROT_NONE) != 0) {
    perror("emulation: stack of a fiber");
    exit(2);
  }
  stack_ = static_cast<char*>(pages);
}

Fiber::Fiber(const std::function<void()>& body) : body_(body) { allocate_stack(); }

Fiber::~Fiber() {
#ifdef EMULATION_THREAD
  __tsan_destroy_fiber(as_thread_);
#endif
  munmap(stack_, kStack);
}

void Fiber::start() {
  // As emulation_switch leaves a stack: six registers, and where to return to.
  auto** top =
      reinterpret_cast<void**>(reinterpret_cast<uintptr_t>(stack_ + kStack) & ~uintptr_t{63});
  top -= 9;                                         // where a call finds the stack aligned
  top[0] = top[1] = top[5] = nullptr;               // r15, r14, rbp
  top[2] = nullptr;                                 // r13
  top[3] = this;                                    // r12
  top[4] = reinterpret_cast<void*>(&Fiber::enter);  // rbx
  top[6] = reinterpret_cast<void*>(&emulation_enter);
  top[7] = nullptr;
  own_ = top;
}

void Fiber::resume() {
#ifdef EMULATION_THREAD
  host_thread_ = __tsan_get_current_fiber();
  __tsan_switch_to_fiber(as_thread_, __tsan_switch_to_fiber_no_sync);
#endif
#ifdef EMULATION_ADDRESS
  void* fake = nullptr;
  __sanitizer_start_switch_fiber(&fake, stack_, kStack);
#endif
  emulation_switch(&host_, own_);
#ifdef EMULATION_ADDRESS
  __sanitizer_finish_switch_fiber(fake, nullptr, nullptr);
#endif
}

namespace {

#ifdef EMULATION_ADDRESS
const void* host_stack = nullptr;
size_t host_stack_size = 0;
#endif

}  // namespace

void Fiber::yield() {
#ifdef EMULATION_THREAD
  __tsan_switch_to_fiber(host_thread_, __tsan_switch_to_fiber_no_sync);
#endif
#ifdef EMULATION_ADDRESS
  void* fake = nullptr;
  __sanitizer_start_switch_fiber(&fake, host_stack, host_stack_size);
#endif
  emulation_switch(&own_, host_);
#ifdef EMULATION_ADDRESS
  __sanitizer_finish_switch_fiber(fake, &host_stack, &host_stack_size);
#endif
}

void Fiber::enter(Fiber* self) {
#ifdef EMULATION_ADDRESS
  __sanitizer_finish_switch_fiber(nullptr, &host_stack, &host_stack_size);
#endif
  self->body_();
  self->yield();
  abort();  // resumed after its end
}

#ifdef EMULATION_THREAD
extern "C" void AnnotateIgnoreWritesBegin(const char* file, int line);
extern "C" void AnnotateIgnoreWritesEnd(const char* file, int line);

void release(void* at) { __tsan_release(at); }
void acquire(void* at) { __tsan_acquire(at); }
#else
static void AnnotateIgnoreWritesBegin(const char*, int) {}
static void AnnotateIgnoreWritesEnd(const char*, int) {}

void release(void*) {}
void acquire(void*) {}
#endif

void* allocate(size_t bytes, size_t alignment) {
  void* memory = nullptr;
  AnnotateIgnoreWritesBegin(__FILE__, __LINE__);
  const int status = posix_memalign(&memory, alignment < 16 ? 16 : alignment, bytes);
  if (status != 0) abort();
#ifndef EMULATION_MEMORY
  memset(memory, 0xff, bytes);  // not a number
#endif
  AnnotateIgnoreWritesEnd(__FILE__, __LINE__);
  return memory;
}

void deallocate(void* memory) {
  AnnotateIgnoreWritesBegin(__FILE__, __LINE__);
  free(memory);
  AnnotateIgnoreWritesEnd(__FILE__, __LINE__);
}

}  // namespace emulation
