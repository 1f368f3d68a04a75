// A posix_memalign and a malloc in front of the C library's that refuse by chance torch's CPU
// allocator and this package's, which asks torch's where it is refused itself. Loaded by LD_PRELOAD.
// Others are not refused: oneDNN does not survive it.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <link.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

static _Atomic uint64_t state, refused, chance;  // of 2^32
static _Atomic size_t least;
typedef struct {
  _Atomic uintptr_t first, last;
} Addresses;
static Addresses torchs, ours;  // of the libraries of the allocators
static _Thread_local int is_refused;  // whether this thread's malloc was: torch's is, too

extern void* __libc_malloc(size_t size);
// A sanitizer's, where there is one: its free() takes nothing else.
extern void* __interceptor_malloc(size_t size) __attribute__((weak));

// dladdr() would say it of any address, and takes a millisecond.
static int find_library(struct dl_phdr_info* library, size_t size, void* unused) {
  (void)size, (void)unused;
  Addresses* found = NULL;
  if (strstr(library->dlpi_name, "libc10.so") != NULL) found = &torchs;
  if (strstr(library->dlpi_name, "memsave_ext/_C") != NULL) found = &ours;
  if (found == NULL) return 0;
  for (int i = 0; i < library->dlpi_phnum; ++i) {
    const ElfW(Phdr)* part = &library->dlpi_phdr[i];
    if (part->p_type != PT_LOAD || !(part->p_flags & PF_X)) continue;
    found->first = library->dlpi_addr + part->p_vaddr;
    found->last = found->first + part->p_memsz;
  }
  return 0;
}

static int is_in(const Addresses* library, const void* caller) {
  return library->first <= (uintptr_t)caller && (uintptr_t)caller < library->last;
}

static int refuses(size_t size) {
  if (size < least) return 0;
  const uint64_t mixed = atomic_fetch_add(&state, 0x9E3779B97F4A7C15u) * 0xBF58476D1CE4E5B9u;
  return ((mixed ^ (mixed >> 29)) * 0x94D049BB133111EBu) >> 32 < chance;
}

// Of calls for at least `size` bytes a share of `refusals` is refused.
void refuse(uint64_t seed, double share, size_t size) {
  if (ours.last == 0) dl_iterate_phdr(find_library, NULL);
  state = seed * 2 + 1;
  chance = (uint64_t)(share * 4294967296.0);
  least = size;
}

uint64_t refusals(void) { return refused; }

int posix_memalign(void** memory, size_t alignment, size_t size) {
  static int (*next)(void**, size_t, size_t);
  if (next == NULL) next = (int (*)(void**, size_t, size_t))dlsym(RTLD_NEXT, "posix_memalign");
  if (chance > 0 && is_in(&torchs, __builtin_return_address(0))) {
    const int was_refused = is_refused;
    is_refused = 0;
    if (was_refused || refuses(size)) {
      ++refused;
      return ENOMEM;
    }
  }
  return next(memory, alignment, size);
}

void* malloc(size_t size) {
  if (chance > 0 && size >= 65536 && is_in(&ours, __builtin_return_address(0)) && refuses(size)) {
    is_refused = 1;
    return NULL;
  }
  return __interceptor_malloc != NULL ? __interceptor_malloc(size) : __libc_malloc(size);
}
