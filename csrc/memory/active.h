// The trackers that run in this process, and the one lock that all of them share.
#pragma once

#include <c10/core/Device.h>

#include <cstdint>
#include <mutex>
#include <optional>
#include <vector>

#include "memory/log.h"

namespace memsave_ext::memory {

// Held while a log is read or changed. Whoever holds it never waits for the GIL, and frees no
// tensor: that could wait for the GIL, or for an allocator's lock, with which others come here.
std::mutex& tracking_mutex();

class TrackingLock {
 public:
  TrackingLock() : lock_(tracking_mutex()) {}

  // Lets go of it when the mutex is not held any more.
  void release_after(c10::intrusive_ptr<c10::StorageImpl> storage) {
    storages_.push_back(std::move(storage));
  }

 private:
  std::vector<c10::intrusive_ptr<c10::StorageImpl>> storages_;  // outlives the lock
  const std::lock_guard<std::mutex> lock_;
};

void add_active(Log* log);  // under the mutex, as all below but the reports
void remove_active(Log* log);
bool any_active(c10::DeviceType type);

// What the allocators report. `total` is the allocator's own figure, where it has one.
void report_allocated(c10::Device device, void* ptr, int64_t size, std::optional<int64_t> total);
void report_freed(c10::Device device, void* ptr, std::optional<int64_t> total);

}  // namespace memsave_ext::memory
