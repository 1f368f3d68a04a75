#include "checkpoint/stepped.h"

#include <c10/core/Storage.h>

#include <algorithm>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "locks.h"

namespace memsave_ext::checkpoint {
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
std::atomic<uint64_t> outdated{0};  // up to this step nothing is pending that asks for it
std::atomic<uint64_t> steps_noted{0};
Lock mutex{LockOrder::kSteppedStorages};  // guards `steps`; no other lock is taken under it
// Never destroyed: what is pending may outlive static destruction.
auto& steps = *new std::unordered_map<const c10::StorageImpl*, StepsOfStorage>();

// The caller holds the mutex.
void forget(uint64_t until) {
  if (until == 0) return;
  for (auto entry = steps.begin(); entry != steps.end();) {
    auto& of_storage = entry->second.steps;
    const auto ended = [&](const NotedStep& step) { return step.number <= until; };
    of_storage.erase(std::remove_if(of_storage.begin(), of_storage.end(), ended), of_storage.end());
    entry = of_storage.empty() ? steps.erase(entry) : std::next(entry);
  }
}

}  // namespace

Pending::Pending() : since_(steps_noted) { ++pending; }

Pending::~Pending() {
  const uint64_t until = steps_noted;  // what another thread makes pending now asks for later ones
  if (--pending == 0) outdated = until;
}

bool Pending::any_stepped() const { return steps_noted > since_; }

std::optional<uint32_t> Pending::stepped(const at::Tensor& tensor) const {
  if (!tensor.has_storage() || tensor.layout() != at::kStrided) return std::nullopt;
  return step_since(since_, tensor.storage().unsafeGetStorageImpl(), ByteRange::of(tensor));
}

bool is_any_pending() { return pending.load(std::memory_order_relaxed) > 0; }

uint64_t steps_so_far() { return steps_noted.load(std::memory_order_relaxed); }

std::optional<uint32_t> step_since(uint64_t since, const c10::StorageImpl* storage,
                                   ByteRange range) {
  if (steps_noted <= since) return std::nullopt;
  const std::lock_guard<Lock> lock(mutex);
  const auto found = steps.find(storage);
  if (found == steps.end()) return std::nullopt;
  for (const auto& step : found->second.steps) {
    if (step.number > since && step.range.overlaps(range)) return step.position;
  }
  return std::nullopt;
}

void note_step(const at::Tensor& param, uint32_t position) {
  if (!is_any_pending() || !param.has_storage()) return;
  const auto range = ByteRange::of(param);
  const std::lock_guard<Lock> lock(mutex);
  forget(outdated.exchange(0));
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

}  // namespace memsave_ext::checkpoint
