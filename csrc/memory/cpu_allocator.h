// An allocator in front of torch's that reports every allocation of CPU tensors, from any thread.
#pragma once

namespace memsave_ext::memory {

// Puts the allocator in place. The caller holds the tracking mutex. Throws where another library's
// allocator must not be displaced.
void watch_cpu_allocator();
// Restores the allocator that was there before. Memory that came from here is still freed
// correctly.
void unwatch_cpu_allocator();

}  // namespace memsave_ext::memory
