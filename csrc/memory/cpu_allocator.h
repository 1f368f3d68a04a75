// Sees every allocation of CPU tensors, from any thread: an allocator in front of torch's.
#pragma once

namespace memsave_ext::memory {

// Under the tracking mutex. Throws where another library's allocator must not be displaced.
void watch_cpu_allocator();
// Puts torch's back. Memory that came through here frees itself as it would have.
void unwatch_cpu_allocator();

}  // namespace memsave_ext::memory
