// Memory that lies elsewhere for a while: in a file, for a GPU in the host's memory, or in a
// prediction nowhere. put() begins to copy it out, and what it returns brings it back; whoever lets
// go of that frees its room.
//
// The rules that code and comments of this room refer to:
//   S1  Who holds one of its locks calls no allocator of torch: there no memory is made, freed or
//       recorded on a stream, and no reference is let go that may be a storage's last one.
//       Allocators call this room while they hold their own lock, and what frees memory may wait
//       for the GIL. Its locks come after kAllocator (csrc/locks.h), so that builds that check
//       locks see a call into a device's allocator.
//   S2  Who holds one of them neither copies nor measures: several threads ask for copies, which
//       streams and their events order.
//   S3  The room of a copy is free once nobody asks for it and no thread copies it. A thread is
//       done with it no later than others see that the copy is over.
//   S4  Copies to and from a device are operators of torch. Who records operators does not record
//       them during put(), begin_back() and in_host_memory().
#pragma once

#include <c10/core/Storage.h>
#include <c10/core/Stream.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>

#include "locks.h"
#include "store/speed.h"

namespace memsave_ext::store {

// Memory that is copied out, lies elsewhere, and comes back, as often as it is asked for.
// Functions that wait are called without the GIL and without a lock.
class Away {
 public:
  virtual ~Away() = default;

  // Whether the copy out is over. Does not wait.
  virtual bool is_out() = 0;
  // From here on the memory may be freed, and written on the current stream: waits, or makes the
  // streams wait.
  virtual void wait_until_out() = 0;
  // Whether the copy could not be made, and why; asked once it is over.
  virtual std::optional<std::string> failure() const { return std::nullopt; }
  // Lets go of the memory that is copied; null while it must not be freed yet.
  virtual c10::intrusive_ptr<c10::StorageImpl> take_source() = 0;

  // Begins to copy back into `memory`, which is as large; nothing where that has begun.
  virtual void begin_back(c10::Storage memory) = 0;
  virtual bool is_coming() = 0;
  // Returns the memory that it was copied back into, for use on the current stream. Waits.
  virtual c10::Storage end_back() = 0;
  // Nobody asks for it any more.
  virtual void cancel() = 0;
};

class Store {
 public:
  virtual ~Store() = default;

  // Whether memory of this device can be put here.
  virtual bool takes(c10::Device device) const = 0;
  // Whether a stream copies out, one after the other, for which streams wait and not the host.
  virtual bool uses_streams() const { return false; }
  // Begins to copy memory out, which nobody writes until that is over. `made_on`: the stream that
  // it was made on; of memory of the CPU, one that fills it. May wait. Null where more than `limit`
  // bytes would be out, of all who use this store. Throws std::runtime_error where there is another
  // reason why it cannot be.
  virtual std::shared_ptr<Away> put(c10::intrusive_ptr<c10::StorageImpl> memory,
                                    const std::optional<c10::Stream>& made_on, int64_t limit) = 0;
  // Measured once for a short time; of a file also of what is copied later. 0 where it is not
  // known.
  virtual Speed speed() = 0;
  // Bytes that are out, of all who use it.
  virtual int64_t used() const = 0;
  // In words, for reports.
  virtual std::string name() const = 0;
};

// A prediction in which memory is fake: its clock goes on as operators and copies would take.
class Prediction {
 public:
  virtual ~Prediction() = default;
  virtual double seconds() const = 0;  // what its clock shows
  virtual void wait_until(double seconds) = 0;
  // A copy takes so long.
  virtual void copied(double seconds) = 0;
  // So many bytes more have a place elsewhere; fewer where negative.
  virtual void moved(int64_t bytes) = 0;
};

// A file in the folder that nobody else sees and that is gone with the process. Those who name the
// same folder share it. Throws std::system_error where it cannot be made.
std::shared_ptr<Store> in_folder(const std::string& folder);

// The same for memory of a CUDA device, through pinned memory of the host, of which a bounded part
// waits to be written. Those who name the same device and folder share it. Copies to the file are
// counted with all that is in the folder.
std::shared_ptr<Store> staged(c10::Device device, const std::string& folder);

// Of a prediction: it holds the fake memory that is copied, and copies take as long as they would
// at this speed, by the prediction's clock. `running` returns the prediction that runs on this
// thread, or null.
std::shared_ptr<Store> predicted(std::string name, Speed speed, Prediction* (*running)());

// Pinned memory of the host, for that of a CUDA device, whose streams copy it. Those who name the
// same device share it. The device waits for copies, the host does not. The first call for a device
// measures its speed, so that no step does.
std::shared_ptr<Store> in_host_memory(c10::Device device);

// What is no longer asked for is destroyed by empty_trash(), as no memory may be freed where locks
// are held.
void discard(std::shared_ptr<Away> away);
void empty_trash();

// The room that copies take in a store.
class Room {
 public:
  // `tell` is called with the bytes by which what is taken grows, or shrinks where negative.
  using Tell = std::function<void(int64_t)>;
  explicit Room(Tell tell = [](int64_t) {}) : tell_(std::move(tell)) {}

  bool take(int64_t bytes, int64_t limit) {
    int64_t used = used_;
    do {
      if (bytes > limit - used) return false;
    } while (!used_.compare_exchange_weak(used, used + bytes));
    tell_(bytes);
    return true;
  }
  void give_back(int64_t bytes) {
    used_ -= bytes;
    tell_(-bytes);
  }
  int64_t used() const { return used_; }

 private:
  const Tell tell_;
  std::atomic<int64_t> used_{0};
};

// The speed of copies one way: of the latest ones more than of those before.
class Meter {
 public:
  void add(int64_t bytes, double seconds);
  double bytes_per_second() const;

 private:
  mutable Lock mutex_{LockOrder::kSpeed};
  double bytes_ = 0, seconds_ = 0;
};

}  // namespace memsave_ext::store
