// Which work of a device is ordered before which, as CUDA's streams and events define it.
//
// Work runs when it is queued. What a card could do otherwise is found by vector clocks: each
// stream knows how much of every other stream it has waited for, each block of memory who used it
// last. Two uses of the same bytes, one of them a write, that nothing orders are a failure, in
// every run.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace emulated {

using StreamId = int64_t;             // 0: the default stream
using Clock = std::vector<uint64_t>;  // for each stream, how much of its work has ended

struct Use {
  const void* data;  // memory that allocated() was not told of is not checked
  size_t bytes;
  bool writes;
};

StreamId new_stream();
// Queues work, which the caller has done already; `again` does it in the replays of a graph.
void queue(StreamId stream, std::string what, std::vector<Use> uses, std::function<void()> again);

Clock recorded(StreamId stream);
void join(Clock& clock, const Clock& other);  // as if both were waited for
bool is_past(const Clock& event, const Clock& now);
void wait(StreamId stream, const Clock& event);
// Whether all that is queued on `other` comes before what is queued on `stream` next.
bool has_waited(StreamId stream, StreamId other);
void synchronize(const Clock& event);  // the host waits
void synchronize(StreamId stream);
void synchronize_all();

void allocated(void* data, size_t bytes, StreamId stream);
// Memory that the host allocates for transfers. Its allocator waits for every use by itself.
void allocated_pinned(void* data, size_t bytes);
bool is_pinned(const void* data);
// The memory may go to the next allocation on its stream. False: a graph needs it for its replays.
bool freed(void* data);
// freed() is to wait for this stream's work.
void used_on(const void* data, StreamId stream);

void failed(const std::string& what);
// Returns what was wrong since the last call, one line each.
std::string take_failures();

// What is queued between these two is undone at the end, and done by replay(). One at a time.
struct Graph;
void begin_capture();
std::shared_ptr<Graph> end_capture();
uint64_t capture();  // the number of the one that runs; 0: none
void replay(const Graph& graph, StreamId stream);

}  // namespace emulated
