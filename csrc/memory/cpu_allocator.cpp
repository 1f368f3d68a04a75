#include "memory/cpu_allocator.h"

#include <c10/core/CPUAllocator.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <exception>
#include <limits>
#include <mutex>
#include <unordered_set>

#include "locks.h"
#include "memory/active.h"
#include "memory/make_room.h"

namespace memsave_ext::memory {
namespace {

const c10::Device cpu(c10::DeviceType::CPU);

// The deleter of the allocator behind ours. Global, because a deleter is a plain function.
std::atomic<c10::DeleterFnPtr> free_behind{nullptr};

void report_and_free(void* ptr) {
  // Reported first: once it is freed, another thread may be given the same address.
  report_freed(cpu, ptr, std::nullopt);
  free_behind.load(std::memory_order_relaxed)(ptr);
}

// Large memory does not come from torch's own allocator, which asks for it with posix_memalign():
// glibc does not find what was freed of it again, as it looks for room that is larger than that by
// the alignment, and a process holds many times what it uses (of 192 MiB in blocks of 8 MiB, 1.3
// GiB). Here glibc is asked for that much more from the beginning, and the address that it gave is
// written down in front of what is handed out.
constexpr size_t kLarge = 64 << 10;
constexpr size_t kAlignment = 64;

auto& larges = *new std::unordered_set<void*>();  // outlives static destruction

void* allocate_large(size_t n) {
  if (n > std::numeric_limits<size_t>::max() - 2 * kAlignment) return nullptr;
  void* const whole = std::malloc(n + 2 * kAlignment);
  if (whole == nullptr) return nullptr;
  const auto address = reinterpret_cast<uintptr_t>(whole) + kAlignment + sizeof(void*);
  auto* const aligned = reinterpret_cast<void**>(address / kAlignment * kAlignment);
  aligned[-1] = whole;
  {
    const std::lock_guard<Lock> lock(large_memory_mutex());
    larges.insert(aligned);
  }
  c10::profiledCPUMemoryReporter().New(aligned, n);
  return aligned;
}

void report_and_free_large(void* ptr) {
  report_freed(cpu, ptr, std::nullopt);
  c10::profiledCPUMemoryReporter().Delete(ptr);
  {
    const std::lock_guard<Lock> lock(large_memory_mutex());
    larges.erase(ptr);
  }
  std::free(static_cast<void**>(ptr)[-1]);
}

// For who has asked for memory without the deleter that came with it.
void report_and_free_either(void* ptr) {
  bool is_large = false;
  {
    const std::lock_guard<Lock> lock(large_memory_mutex());
    is_large = larges.count(ptr) > 0;
  }
  is_large ? report_and_free_large(ptr) : report_and_free(ptr);
}

// Returns whether some memory was freed, so that an allocation is worth trying once more.
bool make_some_room(int64_t bytes) {
  const auto ask = make_room.load(std::memory_order_relaxed);
  return ask != nullptr && ask(cpu, bytes) > 0;
}

class WatchedAllocator final : public c10::Allocator {
 public:
  explicit WatchedAllocator(c10::Allocator* behind)
      : behind_(behind), is_torchs_(behind == c10::GetDefaultCPUAllocator()) {}

  c10::DataPtr allocate(size_t n) override {
    c10::DataPtr data = allocate_somewhere(n);
    const bool is_large = data.get_deleter() == &report_and_free_large;
    if (data.get() == nullptr ||
        (!is_large && !data.compare_exchange_deleter(behind_->raw_deleter(), &report_and_free)))
      return data;
    report_allocated(cpu, data.get(), static_cast<int64_t>(n), std::nullopt);
    return data;
  }
  c10::DeleterFnPtr raw_deleter() const override { return &report_and_free_either; }
  bool is_simple_data_ptr(const c10::DataPtr& data) const override {
    return behind_->is_simple_data_ptr(data);
  }
  void copy_data(void* dest, const void* src, std::size_t count) const override {
    behind_->copy_data(dest, src, count);
  }

  c10::Allocator* behind() const { return behind_; }

 private:
  // Each time that it fails more room is made, until there is none to make: memory in pieces may
  // not do, and another thread may have taken it.
  c10::DataPtr allocate_somewhere(size_t n) const {
    constexpr int64_t kMost = std::numeric_limits<int64_t>::max() / 2;
    for (auto bytes = static_cast<int64_t>(n);; bytes = 2 * std::min(bytes, kMost)) {
      if (is_torchs_ && n >= kLarge) {
        if (void* const large = allocate_large(n)) {
          return {large, large, &report_and_free_large, cpu};
        }
      }
      try {
        return behind_->allocate(n);
      } catch (const std::exception&) {
        if (!make_some_room(bytes)) throw;
      }
    }
  }

  c10::Allocator* behind_;
  const bool is_torchs_;
};

// Never destroyed: storages keep a pointer to the allocator they came from.
WatchedAllocator* watched = nullptr;
int holders = 0;  // guarded by the tracking mutex

}  // namespace

void watch_cpu_allocator() {
  c10::Allocator* present = c10::GetCPUAllocator();
  if (present == watched && watched != nullptr) return;
  survive_forks();
  TORCH_CHECK(
      present->raw_deleter() != nullptr,
      "memory tracking cannot start: another library has registered a CPU allocator without "
      "a raw deleter, which tracking needs and torch's own allocator has");
  if (watched == nullptr) {
    watched = new WatchedAllocator(present);
    free_behind = present->raw_deleter();
  }
  TORCH_CHECK(watched->behind() == present,
              "memory tracking cannot start: the CPU allocator was replaced by another library "
              "since memory was first tracked");
  c10::SetCPUAllocator(watched);
  TORCH_CHECK(c10::GetCPUAllocator() == watched,
              "memory tracking cannot start: another library registered a CPU allocator with a "
              "priority that torch does not let us pass");
}

void unwatch_cpu_allocator() {
  if (holders > 0 || any_active(c10::DeviceType::CPU)) return;
  // An allocator that was registered in the meantime stays.
  if (watched != nullptr && c10::GetCPUAllocator() == watched)
    c10::SetCPUAllocator(watched->behind());
}

bool hold_cpu_allocator() {
  const TrackingLock lock;
  try {
    watch_cpu_allocator();
  } catch (const c10::Error&) {
    return false;
  }
  ++holders;
  return true;
}

void release_cpu_allocator() {
  const TrackingLock lock;
  --holders;
  unwatch_cpu_allocator();
}

}  // namespace memsave_ext::memory
