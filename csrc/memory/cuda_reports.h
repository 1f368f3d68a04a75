// Sees the allocations of CUDA's caching allocator, which reports them to torch's profiler slot of
// the calling thread and of the autograd threads of its backwards.
#pragma once

namespace memsave_ext::memory {

// Throws where torch's profiler runs on this thread: the two share one slot.
void watch_cuda_reports();
// On the same thread.
void unwatch_cuda_reports();
bool watches_cuda_reports();

}  // namespace memsave_ext::memory
