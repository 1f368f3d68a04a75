#include "remat/count.h"

#include <c10/core/CachingDeviceAllocator.h>

#include <algorithm>
#include <utility>

#include "memory/cpu_allocator.h"
#include "remat/content.h"

namespace memsave_ext::remat {

Count::~Count() { stop(); }

void Count::start() {
#ifdef MEMSAVE_EXT_WITH_CUDA
  if (device_.is_cuda() && !std::exchange(hears_cuda_, true)) count_on_cuda(*this);
#endif
  const Bytes now = is_reported() ? Bytes{} : ask();
  memory::TrackingLock lock;
  if (!running_ && device_.is_cpu()) {
    memory::watch_cpu_allocator();
    memory::add_active(this);
  }
  running_ = true;
  survivors_ = {};
  older_.clear();
  earlier_ = std::exchange(blocks_, {});
  blocks_.reserve(earlier_.size());  // as much is counted in every step
  if (counts_all_) {
    for (const auto& [ptr, block] : earlier_) {
      if (block.mark != kFromBefore) survivors_.bytes[block.mark] += block.size;
      blocks_.emplace(ptr, Block{block.size, kFromBefore});
    }
  } else {
    live_ = 0;
  }
  if (!is_reported()) {
    live_ = now.live;
    highest_ = now.peak;
  }
  before_ = live_;
}

void Count::watch(Peak& peak) {
  memory::TrackingLock lock;
  peak.bytes = live_;
  peaks_.push_back(&peak);
}

void Count::unwatch(Peak& peak) {
  memory::TrackingLock lock;
  peaks_.erase(std::remove(peaks_.begin(), peaks_.end(), &peak), peaks_.end());
}

void Count::stop() {
  memory::TrackingLock lock;
  if (!running_) return;
  running_ = false;
  if (!device_.is_cpu()) return;
  memory::remove_active(this);
  memory::unwatch_cpu_allocator();
}

void* Count::address_of(const c10::StorageImpl& storage) {
  const bool is_fake = storage.device().is_meta();
  return is_fake ? const_cast<c10::StorageImpl*>(&storage) : const_cast<void*>(storage.data());
}

Count::Bytes Count::ask() const {
  const auto stats = c10::getDeviceAllocator(device_.type())->getDeviceStats(device_.index());
  const auto& bytes =
      stats.allocated_bytes[static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE)];
  return {bytes.current, bytes.peak};
}

void Count::add(const std::vector<at::Tensor>& tensors, bool are_gradients) {
  if (!is_reported()) return;
  memory::TrackingLock lock;
  for (const auto& tensor : tensors) {
    if (is_plain(tensor)) add(tensor.storage(), are_gradients);
  }
}

// The caller holds the lock.
void Count::add(const c10::Storage& storage, bool is_gradient) {
  void* ptr = address_of(*storage.unsafeGetStorageImpl());
  if (storage.device() != device_ || ptr == nullptr) return;
  const auto size = static_cast<int64_t>(storage.nbytes());
  const auto earlier = earlier_.find(ptr);
  const bool survived = earlier != earlier_.end() && earlier->second.mark != kFromBefore;
  if (counts_all_) {
    if (survived && is_gradient) survivors_.of_gradients += size;
    return;
  }
  if (!blocks_.emplace(ptr, Block{size, kFromBefore}).second) return;
  older_.push_back({ptr, storage.getWeakStorageImpl()});
  if (survived) {
    survivors_.bytes[earlier->second.mark] += size;
    if (is_gradient) survivors_.of_gradients += size;
  }
  before_ += size;
  set_live(live_ + size);
}

void Count::look() {
  memory::TrackingLock lock;
  const auto gone = [&](const Older& older) {
    auto storage = older.storage.lock();
    const bool lives = storage && address_of(*storage) == older.ptr;
    if (storage) lock.release_after(std::move(storage));
    if (lives) return false;
    const auto known = blocks_.find(older.ptr);
    // Otherwise its free was reported, or its address belongs to newer memory.
    if (known != blocks_.end() && known->second.mark == kFromBefore) {
      set_live(live_ - known->second.size);
      blocks_.erase(known);
    }
    return true;
  };
  older_.erase(std::remove_if(older_.begin(), older_.end(), gone), older_.end());
}

bool Count::holds(const void* memory) const {
  memory::TrackingLock lock;
  const auto* at = static_cast<const char*>(memory);
  return std::any_of(blocks_.begin(), blocks_.end(), [&](const auto& each) {
    const auto& [ptr, block] = each;
    const auto* begin = static_cast<const char*>(ptr);
    return block.mark != kFromBefore && begin <= at && at < begin + block.size;
  });
}

int64_t Count::live() const {
  if (asks()) return ask().live;
  memory::TrackingLock lock;
  return live_;
}

int64_t Count::before() const {
  memory::TrackingLock lock;
  return before_;
}

Count::Bytes Count::take(Peak& peak, std::optional<int32_t> mark) {
  const Bytes now = asks() ? ask() : Bytes{};
  memory::TrackingLock lock;
  if (mark) mark_ = *mark;
  if (asks()) {
    set_live(now.live);
    // It has risen, or was reset and has risen to this: since the last look either way.
    if (now.peak != highest_) raise_peaks(now.peak);
    highest_ = now.peak;
  }
  return {live_, std::exchange(peak.bytes, live_)};
}

void Count::forget(Peak& peak) {
  memory::TrackingLock lock;
  peak.bytes = 0;
}

Count::Survivors Count::survivors() const {
  memory::TrackingLock lock;
  return survivors_;
}

std::map<int32_t, int64_t> Count::living() const {
  memory::TrackingLock lock;
  std::map<int32_t, int64_t> bytes;
  for (const auto& [ptr, block] : blocks_) {
    if (block.mark != kFromBefore) bytes[block.mark] += block.size;
  }
  return bytes;
}

void Count::allocated(void* ptr, int64_t size) {
  if (!running_ && !counts_all_) return;
  const auto [known, is_new] = blocks_.emplace(ptr, Block{size, mark_});
  int64_t live = live_ + size;
  if (!is_new) {  // its earlier memory was freed without a report
    live -= known->second.size;
    known->second = {size, mark_};
  }
  set_live(live);
}

void Count::freed(void* ptr) {
  const auto known = blocks_.find(ptr);
  if (known == blocks_.end()) return;
  set_live(live_ - known->second.size);
  blocks_.erase(known);
}

void Count::set_live(int64_t live) {
  live_ = live;
  raise_peaks(live);
}

void Count::raise_peaks(int64_t bytes) {
  for (Peak* peak : peaks_) peak->bytes = std::max(peak->bytes, bytes);
}

}  // namespace memsave_ext::remat
