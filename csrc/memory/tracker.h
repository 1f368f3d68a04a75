// Writes down what happens to the memory of a device, for memsave_ext/memory/tracker.py to read.
#pragma once

#include <ATen/core/Tensor.h>
#include <pybind11/pybind11.h>

#include <cstdint>
#include <deque>
#include <memory>
#include <memory_resource>
#include <optional>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

#include "memory/active.h"

namespace memsave_ext::memory {

// Kinds of events that are written here. memsave_ext/memory/events.py says what they mean and has
// more of them, which note() is given.
enum class Kind : int32_t {
  kAllocated,
  kFreed,
  kFound,
  kLabelled,
  kBeginRecompute,
  kEndRecompute,
  kBeginTracking,
  kResetPeak,
  kMoved,
};

struct Event {  // as memsave_ext/memory/tracker.py unpacks it
  Kind kind;
  Moment moment;
  int64_t subject;
  int64_t value;
  int64_t total;  // live bytes by the allocator's own count; -1 where it has none
};
static_assert(sizeof(Event) == 56);

class Tracker final : public Listener {
 public:
  Tracker(at::Device device, bool stacks) : device_(device), stacks_(stacks) {}
  ~Tracker() override;
  Tracker(const Tracker&) = delete;
  Tracker& operator=(const Tracker&) = delete;

  at::Device device() const override { return device_; }
  bool takes_stacks() const override { return stacks_; }
  bool hears_recomputes() const override { return true; }

  // `total`: live bytes by the allocator's own count (CUDA); nullopt on the CPU. `read` is called,
  // in a thread made for it, when so many events are there that somebody should take them.
  void start(std::optional<int64_t> total, pybind11::object read);
  void check_stop() const;  // raises where it cannot be stopped on this thread
  void stop();

  void note(int32_t kind, int64_t subject, int64_t value);
  // Gives the memory of tensors a category and a name, unless it has them. Memory that is not known
  // is from before tracking; that it was freed is noticed at the next look().
  void label(const std::vector<at::Tensor>& tensors, int64_t category,
             const std::vector<int32_t>& names);
  // Writes down what was freed of memory from before tracking.
  void look();

  int64_t live();
  int64_t peak() const;
  // Sets the peak to what lives now.
  void reset_peak();
  // Returns the next events as bytes, none if there are none, and what their allocations have as
  // origins, null for none; without stacks an empty list. Needs the GIL.
  std::pair<pybind11::bytes, std::vector<std::shared_ptr<Origin>>> take();

  void allocated(const Moment& moment, void* ptr, int64_t size, std::optional<int64_t> total,
                 const std::shared_ptr<const Origin>& origin, TrackingLock& lock) override;
  void freed(const Moment& moment, void* ptr, std::optional<int64_t> total) override;
  void recompute(const Moment& moment, checkpoint::Again what, bool begins) override;
  void moved(const Moment& moment, int64_t bytes) override;

 private:
  struct Block {
    int64_t size;
    bool before;  // it was there before tracking
    bool labelled;
  };
  struct Older {  // a block from before tracking
    void* ptr;
    c10::weak_intrusive_ptr<c10::StorageImpl> storage;
  };
  using Blocks = std::pmr::unordered_map<void*, Block>;

  static std::pmr::memory_resource* pool();
  bool takes_stacks_of_operators() const { return !device_.is_cpu(); }
  void write(const Moment& moment, Kind kind, int64_t subject, int64_t value, int64_t total);
  void write(const Moment& moment, Kind kind, const void* ptr, int64_t value) {
    // The CPU's allocator does not count, so that the reader does.
    write(moment, kind, reinterpret_cast<int64_t>(ptr), value, device_.is_cpu() ? -1 : total_);
  }
  void label(const at::Tensor& tensor, int64_t category, int32_t name);
  void look(TrackingLock& lock);
  bool is_there(const Older& older, TrackingLock& lock) const;
  void remove(const Moment& moment, Blocks::iterator it, std::optional<int64_t> total);

  const at::Device device_;
  const bool stacks_;
  bool running_ = false;
  std::thread::id thread_;    // that started it
  bool in_backward_ = false;  // at the latest allocation
  int64_t time_ = 0;          // of the latest event: it never goes back, though threads' clocks may
  int64_t total_ = 0;
  int64_t peak_ = 0;
  Blocks blocks_{pool()};
  std::vector<Older> older_;
  std::pmr::deque<Event> events_{pool()};
  std::deque<std::shared_ptr<const Origin>> origins_;  // of allocations in events_
  std::shared_ptr<pybind11::object> read_;             // null unless running
};

// Waits until no thread reads events, and lets none begin: one that runs Python when Python ends
// takes the process with it. Call it without the GIL.
void end_reading();

}  // namespace memsave_ext::memory
