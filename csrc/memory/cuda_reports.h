// Receives the reports of CUDA's caching allocator. It sends them to torch's profiler slot, which
// belongs to the calling thread and to the autograd threads of its backwards.
#pragma once

namespace memsave_ext::memory {

// Throws where torch's profiler runs on this thread, because the two share one slot.
void watch_cuda_reports();
// Must be called on the thread that called watch_cuda_reports().
void unwatch_cuda_reports();
bool watches_cuda_reports();

}  // namespace memsave_ext::memory
