// Listens to CUDA's caching allocator: counts what it gives, and lets blocks give memory back
// before it gives up.
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAFunctions.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>

#include "cuda_stream.h"
#include "memory/active.h"
#include "memory/make_room.h"
#include "remat/count.h"
#include "remat/give_way.h"

namespace memsave_ext::remat {
namespace {

// What the allocator may be asked for at once, as a part of the device: it does not say.
constexpr int64_t kPart = 8;

// By device: the bytes that its allocator has refused since it was last asked for some.
std::array<std::atomic<int64_t>, 128> refused{};

// The bytes that the process may still take of a device, as memsave_ext/shared/device_memory.py has
// them. Of these an allocation can be made, in one piece or once cached segments are given back.
int64_t free_of(c10::Device device, size_t free, size_t total) {
  using c10::CachingAllocator::StatType;
  const auto stats = c10::getDeviceAllocator(device.type())->getDeviceStats(device.index());
  const auto now = [](const c10::CachingAllocator::StatArray& bytes) {
    return bytes[static_cast<size_t>(StatType::AGGREGATE)].current;
  };
  const int64_t reserved = now(stats.reserved_bytes);
  const double share = c10::cuda::CUDACachingAllocator::getMemoryFraction(device.index());
  const auto allowed = static_cast<int64_t>(share * static_cast<double>(total));
  const int64_t more = std::min(static_cast<int64_t>(free), allowed - reserved);
  const int64_t kept = reserved - now(stats.allocated_bytes) - now(stats.inactive_split_bytes);
  return std::max<int64_t>(more, 0) + std::max<int64_t>(kept, 0);
}

// The allocator calls it whenever it has no block to reuse, before it asks the device for more. It
// has its lock then, which this thread may take again to free memory and to read statistics.
class GiveWay final : public c10::FreeMemoryCallback {
 public:
  bool Execute() override {
    const auto ask = memory::make_room.load(std::memory_order_relaxed);
    if (ask == nullptr) return false;
    const c10::Device device(c10::DeviceType::CUDA, c10::cuda::current_device());
    if (is_capturing(device)) return false;
    // Then memory that is freed has Python's frames gathered, for which another thread may have the
    // GIL, and wait for the allocator.
    if (c10::cuda::CUDACachingAllocator::isHistoryEnabled()) return false;
    size_t free = 0, total = 0;
    if (cudaMemGetInfo(&free, &total) != cudaSuccess) return false;
    // Who was refused so many bytes may ask again: then they do not fit as it is.
    const int64_t again = refused[device.index()].exchange(0);
    const auto enough = static_cast<int64_t>(total) / kPart;
    if (again == 0 && free_of(device, free, total) >= enough) return false;
    return ask(device, std::max(again, enough)) > 0;
  }
};

// By device; guarded by the tracking mutex, which whoever has it never holds while it calls the
// allocator.
auto& cuda_counts = *new std::map<c10::DeviceIndex, Count*>();

template <class Entry>
void hear(const Entry& entry) {
  const bool is_given = entry.action_ == Entry::ALLOC;
  if (entry.action_ == Entry::OOM) refused[entry.device_] = static_cast<int64_t>(entry.size_);
  if (!is_given && entry.action_ != Entry::FREE_REQUESTED) return;
  const auto bytes = static_cast<int64_t>(entry.size_);
  const memory::TrackingLock lock;
  const auto count = cuda_counts.find(entry.device_);
  if (count != cuda_counts.end()) count->second->changed_on_cuda(is_given ? bytes : -bytes);
}

void hear_of_cuda() {
  static std::once_flag once;
  std::call_once(once, [] {  // it cannot be taken back
    c10::cuda::CUDACachingAllocator::attachAllocatorTraceTracker(
        [](const auto& entry) { hear(entry); });
  });
}

}  // namespace

void count_on_cuda(Count& count) {
  hear_of_cuda();
  const memory::TrackingLock lock;
  cuda_counts[count.device().index()] = &count;
}

void give_way_to_cuda() {
  hear_of_cuda();
  constexpr const char* kName = "memsave_ext";
  auto* callbacks = c10::FreeCudaMemoryCallbacksRegistry();
  // It cannot be taken back, and a name twice ends the process.
  if (callbacks->Has(kName)) return;
  callbacks->Register(kName, []() -> std::unique_ptr<c10::FreeMemoryCallback> {
    return std::make_unique<GiveWay>();
  });
}

}  // namespace memsave_ext::remat
