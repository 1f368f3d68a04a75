#include "memory/cpu_allocator.h"

#include <c10/core/CPUAllocator.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <atomic>
#include <exception>
#include <limits>

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

// Returns whether some memory was freed, so that an allocation is worth trying once more.
bool make_some_room(int64_t bytes) {
  const auto ask = make_room.load(std::memory_order_relaxed);
  return ask != nullptr && ask(cpu, bytes) > 0;
}

class WatchedAllocator final : public c10::Allocator {
 public:
  explicit WatchedAllocator(c10::Allocator* behind) : behind_(behind) {}

  c10::DataPtr allocate(size_t n) override {
    c10::DataPtr data = allocate_behind(n);
    if (data.get() == nullptr ||
        !data.compare_exchange_deleter(behind_->raw_deleter(), &report_and_free))
      return data;
    report_allocated(cpu, data.get(), static_cast<int64_t>(n), std::nullopt);
    return data;
  }
  c10::DeleterFnPtr raw_deleter() const override { return &report_and_free; }
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
  c10::DataPtr allocate_behind(size_t n) const {
    constexpr int64_t kMost = std::numeric_limits<int64_t>::max() / 2;
    for (auto bytes = static_cast<int64_t>(n);; bytes = 2 * std::min(bytes, kMost)) {
      try {
        return behind_->allocate(n);
      } catch (const std::exception&) {
        if (!make_some_room(bytes)) throw;
      }
    }
  }

  c10::Allocator* behind_;
};

// Never destroyed: storages keep a pointer to the allocator they came from.
WatchedAllocator* watched = nullptr;

}  // namespace

void watch_cpu_allocator() {
  c10::Allocator* present = c10::GetCPUAllocator();
  if (present == watched && watched != nullptr) return;
  TORCH_CHECK(present->raw_deleter() != nullptr,
              "memory tracking needs a CPU allocator with a raw deleter, as torch's own has; "
              "another library has registered one without");
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
  // An allocator that was registered in the meantime stays.
  if (watched != nullptr && c10::GetCPUAllocator() == watched)
    c10::SetCPUAllocator(watched->behind());
}

}  // namespace memsave_ext::memory
