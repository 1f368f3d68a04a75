// What listens to allocations in this process, and the one lock that all listeners share.
#pragma once

#include <ATen/core/Tensor.h>
#include <pybind11/pybind11.h>

#include <cstdint>
#include <mutex>
#include <optional>
#include <vector>

#include "checkpoint/recomputing.h"
#include "locks.h"
#include "memory/stacks.h"

namespace memsave_ext::memory {

// Pauses tracking on this thread, so that the tracking's own allocations do not count. Calls nest.
inline thread_local int paused_depth = 0;

inline void pause_tracking(bool paused) { paused_depth += paused ? 1 : -1; }

class PauseTracking {
 public:
  PauseTracking() { pause_tracking(true); }
  ~PauseTracking() { pause_tracking(false); }
  PauseTracking(const PauseTracking&) = delete;
  PauseTracking& operator=(const PauseTracking&) = delete;
};

// Guards all listeners. A thread that holds it must not wait for the GIL, nor free a tensor:
// freeing may wait for the GIL, or for an allocator's lock, whose holder may be waiting for this
// mutex.
Lock& tracking_mutex();

// Guards which large memory of cpu_allocator.cpp lives. Taken after the tracking mutex.
Lock& large_memory_mutex();

class TrackingLock {
 public:
  TrackingLock() : lock_(tracking_mutex()) {}

  // Releases the storage once the mutex is unlocked.
  void release_after(c10::intrusive_ptr<c10::StorageImpl> storage) {
    storages_.push_back(std::move(storage));
  }

 private:
  std::vector<c10::intrusive_ptr<c10::StorageImpl>> storages_;  // declared first: outlives lock_
  const std::lock_guard<Lock> lock_;
};

// When and where something happens. As the members of Event in
// memsave_ext/memory/events.py.
struct Moment {
  static constexpr int64_t kNoNode = -1, kNotInBackward = -2;

  int32_t thread;       // autograd's number of it
  int32_t node_thread;  // of the thread that made the autograd node that runs
  int64_t time;         // ns of a steady clock
  int64_t node;         // its sequence number, or one of the above

  static Moment now();
};

// Hears of allocations on a device. The caller holds the mutex. `moment` is empty for one that does
// not ask for it. `total` is the number of live bytes
// by the allocator's own count, if it has one.
class Listener {
 public:
  virtual ~Listener() = default;
  virtual at::Device device() const = 0;
  virtual bool takes_stacks() const { return false; }
  virtual bool hears_recomputes() const { return false; }
  // Whether it asks for moments. To tell one takes longer than a small allocation.
  virtual bool hears_moments() const { return true; }
  virtual void allocated(const Moment& moment, void* ptr, int64_t size,
                         std::optional<int64_t> total, const std::shared_ptr<const Origin>& origin,
                         TrackingLock& lock) = 0;
  virtual void freed(const Moment& moment, void* ptr, std::optional<int64_t> total) = 0;
  virtual void recompute(const Moment&, checkpoint::Again, bool /*begins*/) {}
  // So many bytes of the device's memory lie elsewhere now.
  virtual void moved(const Moment&, int64_t /*bytes*/) {}
};

// Installs fork handlers. Without them, a child that is forked while another thread holds this
// mutex, or that of large memory, would wait for it forever. What the child allocates is not
// tracked.
void survive_forks();

// The caller of these holds the mutex.
void add_active(Listener* listener);
void remove_active(Listener* listener);
bool any_active(c10::DeviceType type);
int64_t moved_bytes(c10::Device device);

// The allocators call these without the mutex.
void report_allocated(c10::Device device, void* ptr, int64_t size, std::optional<int64_t> total);
void report_freed(c10::Device device, void* ptr, std::optional<int64_t> total);

// So many bytes more of what was in the device's memory have a place elsewhere, such as in a file;
// fewer where negative. Called without the mutex.
void report_moved(c10::Device device, int64_t bytes);

// Calls `listener(is_region, begins)` at the begin and end of every recompute, until it is
// replaced; nullopt for none. Needs the GIL. It must not raise.
void listen_to_recomputes(std::optional<pybind11::object> listener);

}  // namespace memsave_ext::memory
