#include "clocks.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <mutex>
#include <optional>
#include <set>

#include "managed.h"

namespace emulated {

struct Graph {
  struct Work {
    std::string what;
    std::vector<Use> uses;
    std::function<void()> again;
  };
  std::vector<Work> work;
};

namespace {

struct Past {
  const char *begin, *end;
  StreamId stream;
  uint64_t time;  // of that stream
  bool writes;
  std::string what;
};

struct Block {
  size_t bytes;
  std::optional<StreamId> stream;  // none for pinned memory
  std::vector<Past> uses;
  std::set<StreamId> recorded;
};

std::recursive_mutex mutex;
using Lock = std::lock_guard<std::recursive_mutex>;
std::vector<Clock> streams(1);
Clock host;  // what the host has waited for
std::map<const char*, Block> blocks;
std::vector<std::string> failures;
std::shared_ptr<Graph> captured;
// What a capture changes, as it was before.
struct Before {
  std::vector<Clock> streams;
  std::map<const char*, Block> blocks;
  std::vector<std::pair<char*, std::string>> bytes;
};
Before before;
uint64_t captures = 0;

bool is_over(const Past& use, const Clock& clock) {
  const auto stream = static_cast<size_t>(use.stream);
  return use.time == 0 || (stream < clock.size() && use.time <= clock[stream]);
}

std::pair<const char* const, Block>* block_at(const void* data) {
  const auto* const at = static_cast<const char*>(data);
  auto found = blocks.upper_bound(at);
  if (found == blocks.begin()) return nullptr;
  --found;
  return at < found->first + found->second.bytes ? &*found : nullptr;
}

std::string on(StreamId stream) { return " on stream " + std::to_string(stream); }

void check(std::vector<Past>& uses, const Past& now, const Clock& clock) {
  for (const Past& past : uses) {
    if (past.end <= now.begin || now.end <= past.begin || !(past.writes || now.writes)) continue;
    if (is_over(past, clock)) continue;
    failed(now.what + on(now.stream) + (now.writes ? " writes" : " reads") + " what " + past.what +
           on(past.stream) + (past.writes ? " writes" : " reads") + ": nothing orders the two");
  }
  // What is over, and would be reported for nothing that this use would not be.
  const auto covered = [&](const Past& past) {
    return is_over(past, clock) && now.begin <= past.begin && past.end <= now.end &&
           (now.writes || !past.writes);
  };
  uses.erase(std::remove_if(uses.begin(), uses.end(), covered), uses.end());
  uses.push_back(now);
}

}  // namespace

StreamId new_stream() {
  const Lock lock(mutex);
  streams.emplace_back();
  return static_cast<StreamId>(streams.size()) - 1;
}

void queue(StreamId stream, std::string what, std::vector<Use> uses, std::function<void()> again) {
  const Lock lock(mutex);
  Clock& clock = streams[stream];
  join(clock, host);
  clock.resize(streams.size());
  const uint64_t time = ++clock[stream];
  for (const Use& use : uses) {
    auto* const block = use.bytes == 0 ? nullptr : block_at(use.data);
    if (block == nullptr) continue;
    const auto* const begin = static_cast<const char*>(use.data);
    check(block->second.uses, {begin, begin + use.bytes, stream, time, use.writes, what}, clock);
  }
  note_uses(stream, uses);
  if (captured) captured->work.push_back({std::move(what), std::move(uses), std::move(again)});
}

Clock recorded(StreamId stream) {
  const Lock lock(mutex);
  Clock clock = streams[stream];
  join(clock, host);
  return clock;
}

void join(Clock& clock, const Clock& other) {
  clock.resize(std::max(clock.size(), other.size()));
  for (size_t i = 0; i < other.size(); ++i) clock[i] = std::max(clock[i], other[i]);
}

bool is_past(const Clock& event, const Clock& now) {
  for (size_t i = 0; i < event.size(); ++i) {
    if (event[i] > (i < now.size() ? now[i] : 0)) return false;
  }
  return true;
}

void wait(StreamId stream, const Clock& event) {
  const Lock lock(mutex);
  join(streams[stream], event);
}

bool has_waited(StreamId stream, StreamId other) {
  const Lock lock(mutex);
  const auto work_of_other = [other](const Clock& clock) {
    const auto index = static_cast<size_t>(other);
    return index < clock.size() ? clock[index] : 0;
  };
  return work_of_other(recorded(stream)) >= work_of_other(streams[other]);
}

void synchronize(const Clock& event) {
  const Lock lock(mutex);
  if (captured) failed("the host waits while a graph is captured");
  join(host, event);
}

void synchronize(StreamId stream) { synchronize(recorded(stream)); }

void synchronize_all() {
  const Lock lock(mutex);
  for (const Clock& clock : streams) synchronize(clock);
}

void allocated(void* data, size_t bytes, StreamId stream) {
  const Lock lock(mutex);
  const auto* const begin = static_cast<const char*>(data);
  // Whoever had this memory before was done with it for the stream that it is allocated on.
  const Clock clock = recorded(stream);
  const auto own = static_cast<size_t>(stream);
  const uint64_t time = own < clock.size() ? clock[own] : 0;
  blocks[begin] = {
      bytes, stream, {{begin, begin + bytes, stream, time, true, "an allocation"}}, {}};
}

void allocated_pinned(void* data, size_t bytes) {
  const Lock lock(mutex);
  blocks[static_cast<const char*>(data)] = {bytes, {}, {}, {}};
}

bool is_pinned(const void* data) {
  const Lock lock(mutex);
  const auto* const block = block_at(data);
  return block != nullptr && !block->second.stream;
}

bool freed(void* data) {
  const Lock lock(mutex);
  const auto found = blocks.find(static_cast<const char*>(data));
  if (found == blocks.end()) return true;
  if (captured) return false;
  const Block block = std::move(found->second);
  blocks.erase(found);
  if (!block.stream) return true;
  Clock clock = recorded(*block.stream);
  for (const StreamId stream : block.recorded) join(clock, recorded(stream));
  for (const Past& past : block.uses) {
    if (is_over(past, clock)) continue;
    failed("memory of stream " + std::to_string(*block.stream) + " is freed, which " + past.what +
           on(past.stream) + " may still use");
  }
  return true;
}

void used_on(const void* data, StreamId stream) {
  const Lock lock(mutex);
  if (auto* const block = block_at(data)) block->second.recorded.insert(stream);
}

void failed(const std::string& what) {
  const Lock lock(mutex);
  failures.push_back(what);
}

std::string take_failures() {
  const Lock lock(mutex);
  std::string all;
  for (const std::string& failure : failures) all += failure + "\n";
  failures.clear();
  return all;
}

void begin_capture() {
  const Lock lock(mutex);
  captured = std::make_shared<Graph>();
  ++captures;
  before = {streams, blocks, {}};
  for (const auto& [data, block] : blocks) {
    before.bytes.emplace_back(const_cast<char*>(data), std::string(data, block.bytes));
  }
}

std::shared_ptr<Graph> end_capture() {
  const Lock lock(mutex);
  for (const auto& [data, bytes] : before.bytes) memcpy(data, bytes.data(), bytes.size());
  before.streams.resize(streams.size());
  streams = std::move(before.streams);
  // What the graph allocated is its own for good.
  for (auto& [data, block] : blocks) block.uses.clear();
  for (auto& [data, block] : before.blocks) blocks[data] = std::move(block);
  before = {};
  return std::move(captured);
}

uint64_t capture() {
  const Lock lock(mutex);
  return captured ? captures : 0;
}

void replay(const Graph& graph, StreamId stream) {
  for (const Graph::Work& work : graph.work) {
    work.again();
    queue(stream, work.what, work.uses, work.again);
  }
}

}  // namespace emulated
