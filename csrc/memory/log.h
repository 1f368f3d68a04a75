// What one tracker of memory knows: every block that lives, who made it, and the changes in order.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <deque>
#include <memory>
#include <unordered_map>
#include <vector>

#include "memory/moment.h"
#include "memory/threads.h"

namespace memsave_ext::memory {

// The order of CATEGORIES in memsave_ext/memory/account.py.
enum class Category : int8_t { kParameters, kGradients, kOptimizer, kActivations, kOther, kNone };

class TrackingLock;

struct Block {
  int64_t size = 0;
  Category label = Category::kNone;
  Phase phase = Phase::kOther;  // in which it was allocated
  int64_t span = 0;             // which forward or which recompute that was
  bool temporary = false;       // freed before that forward or recompute ended
  int32_t name = -1;
  int32_t module = -1;
  std::shared_ptr<torch::CapturedTraceback> stack;

  Category category() const;
};

struct Event {
  int64_t time;
  std::shared_ptr<Block> block;  // null: one of before tracking was freed, or a phase began
  int64_t total;                 // live bytes after it
  Phase phase;
  bool freed;
};

// A run of events of one training step, complete in itself, so that others can be dropped.
struct Part {
  int64_t number;  // parts that follow each other have numbers that do
  int64_t step;
  int64_t time;
  int64_t total;
  std::vector<std::shared_ptr<Block>> live;  // at its beginning
  std::vector<Event> events;
  int64_t peak;
};

// Every call is made under the mutex of active.h, as the lock that some are given says. Keeps at
// most about `max_events`: the part with the highest peak and the latest ones.
class Log {
 public:
  Log(at::Device device, std::vector<int32_t> parents, bool stacks, int64_t max_events);

  at::Device device() const { return device_; }
  bool stacks() const { return stacks_; }

  // `total` is the allocator's figure; without one it is kept here (CPU).
  void allocated(const Moment& moment, void* ptr, int64_t size, std::optional<int64_t> total,
                 TrackingLock& lock);
  void freed(const Moment& moment, void* ptr, std::optional<int64_t> total);
  // A row without a change: what may allocate nothing begins or ends.
  void mark_phase(const Moment& moment);

  // Gives the memory of a tensor a category and a name. Memory that is not known was there before
  // tracking began; its end is noticed at the next look().
  void label(const at::Tensor& tensor, Category category, int32_t name);
  void look(TrackingLock& lock);

  // The next part begins: at a start and at the end of a step.
  void begin_part(std::optional<int64_t> total);
  void end_step();
  void reset_peak();

  int64_t live() const { return total_; }
  int64_t peak() const { return peak_; }
  const std::deque<Part>& parts() const { return parts_; }
  Threads& threads() { return threads_; }
  const Threads& threads() const { return threads_; }

 private:
  struct Older {
    void* ptr;
    std::shared_ptr<Block> block;
    c10::weak_intrusive_ptr<c10::StorageImpl> storage;
  };

  bool is_there(const Older& older, TrackingLock& lock) const;
  void remove(const Moment& moment, std::unordered_map<void*, std::shared_ptr<Block>>::iterator it,
              std::optional<int64_t> total);
  void add_event(const Moment& moment, std::shared_ptr<Block> block, Phase phase, bool freed);
  void drop_parts();

  at::Device device_;
  bool stacks_;
  size_t max_events_;
  Phase phase_ = Phase::kOther;  // of the latest allocation
  size_t events_ = 0;            // of all parts, with what lived when they began
  int64_t step_ = 0;
  int64_t part_ = 0;
  int64_t time_ = 0;  // of the latest event: threads may come out of order
  int64_t total_ = 0;
  int64_t peak_ = 0;
  std::unordered_map<void*, std::shared_ptr<Block>> live_;
  std::vector<Older> older_;
  std::deque<Part> parts_;
  Threads threads_;
};

}  // namespace memsave_ext::memory
