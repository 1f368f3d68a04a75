#include "memory/log.h"

#include <algorithm>
#include <utility>

namespace memsave_ext::memory {

namespace {

std::shared_ptr<Block> new_block() {
  return std::allocate_shared<Block>(std::pmr::polymorphic_allocator<Block>(block_memory()));
}

}  // namespace

std::pmr::memory_resource* block_memory() {
  // Never destroyed: a record may outlive all else. Other threads free its blocks.
  static auto* const pool = new std::pmr::synchronized_pool_resource();
  return pool;
}

Category Block::category() const {
  if (label != Category::kNone) return label;
  const bool made_by_forward = phase == Phase::kForward || is_recompute(phase);
  return made_by_forward && !temporary ? Category::kActivations : Category::kOther;
}

Log::Log(at::Device device, std::vector<int32_t> parents, bool stacks, int64_t max_events)
    : device_(device),
      stacks_(stacks),
      max_events_(static_cast<size_t>(max_events)),
      threads_(std::move(parents)) {}

void Log::allocated(const EventContext& context, void* ptr, int64_t size,
                    std::optional<int64_t> total, TrackingLock& lock) {
  // If the address is already known, its block was freed without a report.
  if (const auto known = live_.find(ptr); known != live_.end())
    remove(context, known, total.has_value() ? std::optional(total_) : std::nullopt);
  const Where where = threads_.where(context);
  // Gradients from before tracking may be freed between forward and backward, where no hook runs:
  // look for them when backward begins.
  if (where.phase == Phase::kBackward && phase_ != Phase::kBackward) look(lock);
  phase_ = where.phase;
  auto block = new_block();
  block->size = size;
  block->phase = where.phase;
  block->span = where.span;
  block->module = where.module;
  if (stacks_) block->origin = context.origin;
  if (is_recompute(where.phase)) threads_.count(where.span, size);
  live_.emplace(ptr, block);
  total_ = total.value_or(total_ + size);
  add_event(context, std::move(block), where.phase, false);
}

void Log::freed(const EventContext& context, void* ptr, std::optional<int64_t> total) {
  if (const auto known = live_.find(ptr); known != live_.end()) {
    remove(context, known, total);
  } else if (total.has_value() && total_ != *total) {
    total_ = *total;
    add_event(context, nullptr, threads_.where(context).phase, true);
  }
}

void Log::recompute(const EventContext& context, Again what, bool begins) {
  if (begins)
    threads_.begin_recompute(context,
                             what == Again::kRegion ? Phase::kRecompute : Phase::kRematerialize);
  else
    threads_.end_recompute(context);
}

void Log::mark_phase(const EventContext& context) {
  if (!parts_.empty()) add_event(context, nullptr, threads_.where(context).phase, true);
}

void Log::remove(const EventContext& context, Blocks::iterator it, std::optional<int64_t> total) {
  std::shared_ptr<Block> block = std::move(it->second);
  live_.erase(it);
  const Where where = threads_.where(context);
  block->temporary = block->phase == where.phase && block->span == where.span;
  if (is_recompute(block->phase)) threads_.count(block->span, -block->size);
  total_ = total.value_or(total_ - block->size);
  add_event(context, std::move(block), where.phase, true);
}

void Log::add_event(const EventContext& context, std::shared_ptr<Block> block, Phase phase,
                    bool freed) {
  if (parts_.back().events.size() >= max_events_ / 4 + 1) begin_part(std::nullopt);
  Part& part = parts_.back();
  time_ = std::max(time_, context.time);
  part.events.push_back({time_, std::move(block), total_, phase, freed});
  part.peak = std::max(part.peak, total_);
  peak_ = std::max(peak_, total_);
  ++events_;
}

void Log::label(const at::Tensor& tensor, Category category, int32_t name) {
  if (!tensor.defined() || !tensor.has_storage() || tensor.device() != device_) return;
  const at::Storage& storage = tensor.storage();
  void* ptr = const_cast<void*>(storage.data());
  if (ptr == nullptr || storage.nbytes() == 0) return;
  auto known = live_.find(ptr);
  if (known == live_.end()) {
    const EventContext context = EventContext::now();
    auto block = new_block();
    block->size = static_cast<int64_t>(storage.nbytes());
    known = live_.emplace(ptr, block).first;
    older_.push_back({ptr, block, storage.getWeakStorageImpl()});
    // The CUDA allocator's own figure includes it already.
    if (device_.is_cpu()) total_ += block->size;
    if (!parts_.empty()) add_event(context, std::move(block), threads_.where(context).phase, false);
  }
  Block& block = *known->second;
  if (block.label != Category::kNone) return;
  block.label = category;
  block.name = name;
}

bool Log::is_there(const Older& older, TrackingLock& lock) const {
  // CUDA's allocator reports memory that a living storage gives up, so it is enough that the
  // storage lives. It is not locked here, because ours could become the last reference: releasing
  // that calls the allocator, which may be what called this.
  if (!device_.is_cpu()) return !older.storage.expired();
  auto storage = older.storage.lock();
  if (!storage) return false;
  const bool same = storage->data() == older.ptr;
  lock.release_after(std::move(storage));
  return same;
}

void Log::look(TrackingLock& lock) {
  if (parts_.empty()) return;
  const auto gone = [&](const Older& older) {
    if (is_there(older, lock)) return false;
    const auto known = live_.find(older.ptr);
    // Otherwise its address belongs to another block by now.
    if (known != live_.end() && known->second == older.block)
      remove(EventContext::now(), known, device_.is_cpu() ? std::nullopt : std::optional(total_));
    return true;
  };
  older_.erase(std::remove_if(older_.begin(), older_.end(), gone), older_.end());
}

void Log::begin_part(std::optional<int64_t> total) {
  total_ = total.value_or(total_);
  peak_ = std::max(peak_, total_);
  time_ = std::max(time_, EventContext::now().time);
  Part part{part_++, step_, time_, total_, {}, {}, total_};
  part.live.reserve(live_.size());
  for (const auto& [ptr, block] : live_) part.live.push_back(block);
  events_ += part.live.size();
  parts_.push_back(std::move(part));
  drop_parts();
}

void Log::end_step() {
  ++step_;
  threads_.end_step();
  begin_part(std::nullopt);
}

void Log::reset_peak() {
  peak_ = total_;
  parts_.clear();
  events_ = 0;
  begin_part(std::nullopt);
}

void Log::drop_parts() {
  while (events_ > max_events_ && parts_.size() > 2) {
    // Drops the oldest part, or the second oldest where the oldest holds the peak.
    const size_t oldest = parts_.front().peak == peak_ ? 1 : 0;
    events_ -= parts_[oldest].events.size() + parts_[oldest].live.size();
    parts_.erase(parts_.begin() + static_cast<int64_t>(oldest));
  }
}

}  // namespace memsave_ext::memory
