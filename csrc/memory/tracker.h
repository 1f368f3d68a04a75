// Counts the bytes of live CPU tensors, from the reports every CPU allocation makes.
#pragma once

#include <c10/util/ThreadLocalDebugInfo.h>
#include <torch/csrc/profiler/orchestration/observer.h>

#include <cstdint>
#include <memory>
#include <mutex>
#include <unordered_map>

namespace memsave_ext {

// What one tracker has seen. torch reports the freeing of those blocks only whose allocation it has
// reported to some tracker, so that memory from before does not count. A profiler state, of no
// type, because torch takes whatever is in the slot for one and reads its configuration.
class AllocationCounter : public torch::profiler::impl::ProfilerStateBase {
 public:
  AllocationCounter();
  void reportMemoryUsage(void* ptr, int64_t alloc_size, size_t total_allocated,
                         size_t total_reserved, c10::Device device) override;
  bool memoryProfilingEnabled() const override { return true; }
  torch::profiler::impl::ActiveProfilerType profilerType() override {
    return torch::profiler::impl::ActiveProfilerType::NONE;
  }

  int64_t live() const;
  int64_t peak() const;
  void reset_peak();

 private:
  mutable std::mutex mutex_;  // the threads of one backward report together
  // By address: torch also reports the freeing of blocks from before, with sizes it may have wrong.
  std::unordered_map<void*, int64_t> blocks_;
  int64_t live_ = 0;
  int64_t peak_ = 0;
};

// Installs a counter on this thread; the autograd threads of its backwards inherit it. It shares
// torch's profiler slot: the two exclude each other on one thread.
class AllocationTracker {
 public:
  void start();
  void stop();
  int64_t live() const { return counter_->live(); }
  int64_t peak() const { return counter_->peak(); }
  void reset_peak() { counter_->reset_peak(); }

 private:
  std::shared_ptr<AllocationCounter> counter_ = std::make_shared<AllocationCounter>();
};

}  // namespace memsave_ext
