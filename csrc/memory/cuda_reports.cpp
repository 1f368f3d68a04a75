#include "memory/cuda_reports.h"

#include <c10/util/Exception.h>
#include <c10/util/ThreadLocalDebugInfo.h>
#include <torch/csrc/profiler/orchestration/observer.h>

#include <memory>

#include "memory/active.h"

namespace memsave_ext::memory {
namespace {

using c10::DebugInfoKind;
using c10::ThreadLocalDebugInfo;
using torch::profiler::impl::ProfilerConfig;
using torch::profiler::impl::ProfilerState;

// Must be a profiler state (of type NONE): torch takes whatever is in the slot for one, and reads
// its configuration.
class Reports : public torch::profiler::impl::ProfilerStateBase {
 public:
  Reports() : ProfilerStateBase(ProfilerConfig(ProfilerState::Disabled)) {}

  void reportMemoryUsage(void* ptr, int64_t alloc_size, size_t total_allocated, size_t,
                         c10::Device device) override {
    if (device.is_cpu()) return;  // reported by the allocator of cpu_allocator.h
    const auto total = static_cast<int64_t>(total_allocated);
    if (alloc_size > 0)
      report_allocated(device, ptr, alloc_size, total);
    else
      report_freed(device, ptr, total);
  }
  bool memoryProfilingEnabled() const override { return true; }
  torch::profiler::impl::ActiveProfilerType profilerType() override {
    return torch::profiler::impl::ActiveProfilerType::NONE;
  }
};

}  // namespace

bool watches_cuda_reports() {
  return dynamic_cast<Reports*>(ThreadLocalDebugInfo::get(DebugInfoKind::PROFILER_STATE)) !=
         nullptr;
}

void watch_cuda_reports() {
  TORCH_CHECK(
      ThreadLocalDebugInfo::get(DebugInfoKind::PROFILER_STATE) == nullptr || watches_cuda_reports(),
      "memory tracking of a CUDA device cannot start: torch's profiler is running on this "
      "thread, and only one of both can run in a thread");
  ThreadLocalDebugInfo::_push(DebugInfoKind::PROFILER_STATE, std::make_shared<Reports>());
}

void unwatch_cuda_reports() { ThreadLocalDebugInfo::_pop(DebugInfoKind::PROFILER_STATE); }

}  // namespace memsave_ext::memory
