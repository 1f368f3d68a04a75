// The trackers and counts that run in this process, and the one lock that all of them share.
#pragma once

#include <c10/core/Device.h>
#include <pybind11/pybind11.h>

#include <cstdint>
#include <mutex>
#include <optional>
#include <vector>

#include "memory/count.h"
#include "memory/log.h"

namespace memsave_ext::memory {

// Guards all logs and counts. A thread that holds it must not wait for the GIL, nor free a tensor:
// freeing may wait for the GIL, or for an allocator's lock, whose holder may be waiting for this
// mutex.
std::mutex& tracking_mutex();

class TrackingLock {
 public:
  TrackingLock() : lock_(tracking_mutex()) {}

  // Releases the storage once the mutex is unlocked.
  void release_after(c10::intrusive_ptr<c10::StorageImpl> storage) {
    storages_.push_back(std::move(storage));
  }

 private:
  std::vector<c10::intrusive_ptr<c10::StorageImpl>> storages_;  // declared first: outlives lock_
  const std::lock_guard<std::mutex> lock_;
};

// The caller of these holds the mutex.
void add_active(Log* log);
void add_active(Count* count);
void remove_active(Log* log);
void remove_active(Count* count);
bool any_active(c10::DeviceType type);

// The allocators call these without the mutex. `total` is the number of live bytes by the
// allocator's own count, if it has one.
void report_allocated(c10::Device device, void* ptr, int64_t size, std::optional<int64_t> total);
void report_freed(c10::Device device, void* ptr, std::optional<int64_t> total);

// Calls `listener(is_region, begins)` at the begin and end of every recompute, until it is
// replaced; nullopt for none. Needs the GIL. It must not raise.
void listen_to_recomputes(std::optional<pybind11::object> listener);

}  // namespace memsave_ext::memory
