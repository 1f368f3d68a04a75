#include "managed.h"

#include <algorithm>
#include <cstdlib>
#include <map>
#include <mutex>
#include <utility>

#include "device.h"

namespace emulated {
namespace {

struct Range {
  size_t bytes;
  bool on_device = false;
  Clock moved = {};  // when the last move to where it is was over
  Clock used = {};   // when all work that used it was
};

std::mutex ranges_mutex;
std::map<const char*, Range> ranges;
int64_t faults = 0, most = 0;

Range* range_of(const void* data) {
  const auto* const at = static_cast<const char*>(data);
  auto found = ranges.upper_bound(at);
  if (found == ranges.begin()) return nullptr;
  --found;
  return at < found->first + found->second.bytes ? &found->second : nullptr;
}

}  // namespace

void* managed(size_t bytes) {
  void* const data = std::aligned_alloc(4096, (bytes + 4095) / 4096 * 4096);
  allocated(data, bytes, current_stream());
  const std::lock_guard<std::mutex> lock(ranges_mutex);
  ranges[static_cast<const char*>(data)] = {bytes};
  return data;
}

void free_managed(void* data) {
  synchronize_all();
  {
    const std::lock_guard<std::mutex> lock(ranges_mutex);
    ranges.erase(static_cast<const char*>(data));
  }
  if (freed(data)) std::free(data);
}

void move_managed(const void* data, size_t, bool to_device, StreamId stream) {
  if (capture() != 0) failed("managed memory is moved while a graph is captured");
  const Clock before = recorded(stream);
  queue(stream, "a move", {}, [] {});
  const std::lock_guard<std::mutex> lock(ranges_mutex);
  Range& range = *range_of(data);
  if (!is_past(range.used, before)) ++faults;
  range.on_device = to_device;
  range.moved = recorded(stream);
  int64_t there = 0;
  for (const auto& [_, other] : ranges) {
    if (other.on_device || !is_past(other.moved, before))
      there += static_cast<int64_t>(other.bytes);
  }
  most = std::max(most, there);
}

void note_uses(StreamId stream, const std::vector<Use>& uses) {
  const std::lock_guard<std::mutex> lock(ranges_mutex);
  for (const Use& use : uses) {
    Range* const range = use.bytes == 0 ? nullptr : range_of(use.data);
    if (range == nullptr) continue;
    const Clock now = recorded(stream);
    if (!range->on_device || !is_past(range->moved, now)) ++faults;
    join(range->used, now);
  }
}

int64_t take_faults() {
  const std::lock_guard<std::mutex> lock(ranges_mutex);
  return std::exchange(faults, 0);
}

int64_t take_most_managed() {
  const std::lock_guard<std::mutex> lock(ranges_mutex);
  return std::exchange(most, 0);
}

}  // namespace emulated
