// A posix_memalign in front of the C library's that refuses torch's CPU allocator by chance. Loaded
// by LD_PRELOAD. Others are not refused: oneDNN does not survive it.
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
static _Atomic uintptr_t first, last;  // of the addresses of torch's CPU allocator's library

// dladdr() would say it of any address, and takes a millisecond.
static int find_library(struct dl_phdr_info* library, size_t size, void* unused) {
  (void)size, (void)unused;
  if (strstr(library->dlpi_name, "libc10.so") == NULL) return 0;
  for (int i = 0; i < library->dlpi_phnum; ++i) {
    const ElfW(Phdr)* part = &library->dlpi_phdr[i];
    if (part->p_type != PT_LOAD || !(part->p_flags & PF_X)) continue;
    first = library->dlpi_addr + part->p_vaddr;
    last = first + part->p_memsz;
  }
  return 1;
}

// Of calls for at least `size` bytes a share of `refusals` is refused.
void refuse(uint64_t seed, double share, size_t size) {
  if (last == 0) dl_iterate_phdr(find_library, NULL);
  state = seed * 2 + 1;
  chance = (uint64_t)(share * 4294967296.0);
  least = size;
}

uint64_t refusals(void) { return refused; }

int posix_memalign(void** memory, size_t alignment, size_t size) {
  static int (*next)(void**, size_t, size_t);
  if (next == NULL) next = (int (*)(void**, size_t, size_t))dlsym(RTLD_NEXT, "posix_memalign");
  const uintptr_t caller = (uintptr_t)__builtin_return_address(0);
  if (chance > 0 && size >= least && first <= caller && caller < last) {
    const uint64_t mixed = atomic_fetch_add(&state, 0x9E3779B97F4A7C15u) * 0xBF58476D1CE4E5B9u;
    if (((mixed ^ (mixed >> 29)) * 0x94D049BB133111EBu) >> 32 < chance) {
      ++refused;
      return ENOMEM;
    }
  }
  return next(memory, alignment, size);
}
