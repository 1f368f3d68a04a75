// The log of one tracker: every live block, what made it, and all changes in order.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <deque>
#include <memory>
#include <memory_resource>
#include <unordered_map>
#include <vector>

#include "memory/active.h"
#include "memory/threads.h"

namespace memsave_ext::memory {

// Indices into CATEGORIES of memsave_ext/memory/account.py; kNone stands for no label.
enum class Category : int8_t { kParameters, kGradients, kOptimizer, kActivations, kOther, kNone };

// Where blocks and their index are kept. In malloc's heap they would lie between the tensors that
// they describe, outlive them, and leave it in pieces, in which malloc searches longer.
std::pmr::memory_resource* block_memory();

struct Block {
  int64_t size = 0;  // bytes
  Category label = Category::kNone;
  Phase phase = Phase::kOther;           // in which it was allocated
  int64_t span = 0;                      // number of that forward or recompute
  bool temporary = false;                // it was freed before that forward or recompute ended
  int32_t name = -1;                     // as given to label(); -1 without
  int32_t module = -1;                   // in which it was allocated; -1 outside of all
  std::shared_ptr<const Origin> origin;  // null where stacks are not taken

  Category category() const;
};

struct Event {
  int64_t time;                  // ns
  std::shared_ptr<Block> block;  // null: memory from before tracking was freed, or mark_phase()
  int64_t total;                 // live bytes after the event
  Phase phase;
  bool freed;
};

// A run of events within one training step. It says what lived at its beginning, so that other
// parts can be dropped.
struct Part {
  int64_t number;  // consecutive, so that a gap shows that parts were dropped
  int64_t step;
  int64_t time;                              // ns, at its beginning
  int64_t total;                             // live bytes at its beginning
  std::vector<std::shared_ptr<Block>> live;  // blocks at its beginning
  std::vector<Event> events;
  int64_t peak;  // most live bytes
};

// The caller holds the tracking mutex of active.h; some calls take its lock as an argument. At most
// about `max_events` events are kept: the part with the highest peak and the latest parts.
class Log final : public Listener {
 public:
  Log(at::Device device, std::vector<int32_t> parents, bool stacks, int64_t max_events);

  at::Device device() const override { return device_; }
  bool takes_stacks() const override { return stacks_; }

  // The CPU's allocator has no `total`: the log counts itself.
  void allocated(const EventContext& context, void* ptr, int64_t size, std::optional<int64_t> total,
                 TrackingLock& lock) override;
  void freed(const EventContext& context, void* ptr, std::optional<int64_t> total) override;
  void recompute(const EventContext& context, Again what, bool begins) override;
  // Adds an event without a change of memory, where a phase begins or ends that may allocate
  // nothing.
  void mark_phase(const EventContext& context);

  // Gives the memory of a tensor a category and a name, unless it has them. Memory that is not
  // known is added as allocated before tracking; that it was freed is noticed at the next look().
  void label(const at::Tensor& tensor, Category category, int32_t name);
  // Removes blocks from before tracking that have been freed since.
  void look(TrackingLock& lock);

  // Begins the next part. Without `total` the count of live bytes goes on.
  void begin_part(std::optional<int64_t> total);
  void end_step();
  // Sets the peak to what lives now and drops all earlier parts.
  void reset_peak();

  int64_t live() const { return total_; }
  int64_t peak() const { return peak_; }
  const std::deque<Part>& parts() const { return parts_; }
  Threads& threads() { return threads_; }
  const Threads& threads() const { return threads_; }

 private:
  // A block from before tracking, known from label().
  struct Older {
    void* ptr;
    std::shared_ptr<Block> block;
    c10::weak_intrusive_ptr<c10::StorageImpl> storage;
  };

  using Blocks = std::pmr::unordered_map<void*, std::shared_ptr<Block>>;

  bool is_there(const Older& older, TrackingLock& lock) const;
  void remove(const EventContext& context, Blocks::iterator it, std::optional<int64_t> total);
  void add_event(const EventContext& context, std::shared_ptr<Block> block, Phase phase,
                 bool freed);
  void drop_parts();

  at::Device device_;
  bool stacks_;
  size_t max_events_;
  Phase phase_ = Phase::kOther;  // of the latest allocation
  size_t events_ = 0;            // in all parts, plus the blocks that lived when they began
  int64_t step_ = 0;
  int64_t part_ = 0;
  // Of the latest event, in ns. Never goes back, though threads may report out of order.
  int64_t time_ = 0;
  int64_t total_ = 0;
  int64_t peak_ = 0;
  Blocks live_{block_memory()};
  std::vector<Older> older_;
  std::deque<Part> parts_;
  Threads threads_;
};

}  // namespace memsave_ext::memory
