#include "checkpoint/stepped.h"

#include <c10/core/Storage.h>

#include <mutex>
#include <unordered_map>
#include <vector>

namespace memsave_ext {
namespace {

struct NotedStep {
  ByteRange range;
  uint64_t number;
  uint32_t position;
};

struct StepsOfStorage {
  // Keeps the address from being given to another storage, not the memory from being freed.
  c10::weak_intrusive_ptr<c10::StorageImpl> storage;
  std::vector<NotedStep> steps;  // one for each parameter in this storage: its latest
};

std::atomic<int64_t> pending{0};
std::atomic<uint64_t> steps_noted{0};
std::mutex mutex;  // guards `steps`; no other lock is taken under it
// Never destroyed: regions may outlive static destruction.
auto& steps = *new std::unordered_map<const c10::StorageImpl*, StepsOfStorage>();

}  // namespace

ByteRange ByteRange::of(const at::Tensor& tensor) {
  const int64_t size = static_cast<int64_t>(tensor.itemsize());
  const int64_t begin = tensor.storage_offset() * size;
  if (tensor.numel() == 0) return {begin, begin};
  int64_t last = 0;
  for (int64_t i = 0; i < tensor.dim(); ++i) last += (tensor.size(i) - 1) * tensor.stride(i);
  return {begin, begin + (last + 1) * size};
}

PendingRegion::PendingRegion() : since_(steps_noted) { ++pending; }

PendingRegion::~PendingRegion() {
  if (--pending > 0) return;
  const std::lock_guard<std::mutex> lock(mutex);
  if (pending == 0) steps.clear();
}

bool PendingRegion::any_stepped() const { return steps_noted > since_; }

std::optional<uint32_t> PendingRegion::stepped(const at::Tensor& tensor) const {
  if (!tensor.has_storage() || tensor.layout() != at::kStrided) return std::nullopt;
  const std::lock_guard<std::mutex> lock(mutex);
  const auto found = steps.find(tensor.storage().unsafeGetStorageImpl());
  if (found == steps.end()) return std::nullopt;
  const auto range = ByteRange::of(tensor);
  for (const auto& step : found->second.steps) {
    if (step.number > since_ && step.range.overlaps(range)) return step.position;
  }
  return std::nullopt;
}

void note_step(const at::Tensor& param, uint32_t position) {
  if (pending.load(std::memory_order_relaxed) == 0 || !param.has_storage()) return;
  const auto range = ByteRange::of(param);
  const std::lock_guard<std::mutex> lock(mutex);
  const uint64_t number = ++steps_noted;
  auto [entry, made] = steps.try_emplace(param.storage().unsafeGetStorageImpl(),
                                         StepsOfStorage{param.storage().getWeakStorageImpl(), {}});
  for (auto& step : entry->second.steps) {
    if (step.range.begin == range.begin && step.range.end == range.end) {
      step = {range, number, position};
      return;
    }
  }
  entry->second.steps.push_back({range, number, position});
}

}  // namespace memsave_ext
