// An allocator in front of torch's that reports every allocation of CPU tensors, from any thread.
#pragma once

namespace memsave_ext::memory {

// Puts the allocator in place. The caller holds the tracking mutex. Throws where another library's
// allocator must not be displaced.
void watch_cpu_allocator();
// Restores the allocator that was there before. Memory that came from here is still freed
// correctly. Nothing happens while somebody listens, or holds it.
void unwatch_cpu_allocator();

// While somebody holds it, the allocator stays in place, so that large memory is found again once
// it is freed. Returns whether it does: another library's is not displaced. Each call that returned
// true is followed by one of release_cpu_allocator().
bool hold_cpu_allocator();
void release_cpu_allocator();

}  // namespace memsave_ext::memory
