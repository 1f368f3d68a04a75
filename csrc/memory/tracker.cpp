#include "memory/tracker.h"

#include <c10/util/Exception.h>

#include <algorithm>

namespace memsave_ext {

using c10::DebugInfoKind;
using c10::ThreadLocalDebugInfo;

using torch::profiler::impl::ProfilerConfig;
using torch::profiler::impl::ProfilerState;

AllocationCounter::AllocationCounter()
    : ProfilerStateBase(ProfilerConfig(ProfilerState::Disabled)) {}

void AllocationCounter::reportMemoryUsage(void* ptr, int64_t alloc_size, size_t, size_t,
                                          c10::Device device) {
  if (!device.is_cpu()) return;
  const std::lock_guard<std::mutex> lock(mutex_);
  // A known address that is allocated again was freed while nobody looked.
  if (const auto known = blocks_.find(ptr); known != blocks_.end()) {
    live_ -= known->second;
    blocks_.erase(known);
  }
  if (alloc_size <= 0) return;
  blocks_[ptr] = alloc_size;
  live_ += alloc_size;
  peak_ = std::max(peak_, live_);
}

int64_t AllocationCounter::live() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return live_;
}

int64_t AllocationCounter::peak() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return peak_;
}

void AllocationCounter::reset_peak() {
  const std::lock_guard<std::mutex> lock(mutex_);
  peak_ = live_;
}

void AllocationTracker::start() {
  TORCH_CHECK(
      ThreadLocalDebugInfo::get(DebugInfoKind::PROFILER_STATE) == nullptr,
      "memory tracking cannot start: this thread is already tracked, or torch's profiler is "
      "running on it; the two share one slot");
  ThreadLocalDebugInfo::_push(DebugInfoKind::PROFILER_STATE, counter_);
}

void AllocationTracker::stop() {
  TORCH_CHECK(ThreadLocalDebugInfo::get(DebugInfoKind::PROFILER_STATE) == counter_.get(),
              "memory tracking cannot stop: it was not started on this thread");
  ThreadLocalDebugInfo::_pop(DebugInfoKind::PROFILER_STATE);
}

}  // namespace memsave_ext
