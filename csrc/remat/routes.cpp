#include "remat/routes.h"

#include <algorithm>

namespace memsave_ext::remat {
namespace {

// Fills in what a repeat of `call` reads, and what runs on the way.
void follow(const Trace& trace, const Routes& routes, int32_t call, std::vector<int32_t>& seen,
            Repeat& repeat) {
  std::vector<int32_t> pending = {call};
  repeat.calls.clear();
  while (!pending.empty()) {
    const int32_t current = pending.back();
    pending.pop_back();
    for (const int32_t read : trace.calls[current].reads) {
      if (seen[read] == call) continue;
      seen[read] = call;
      const auto& content = trace.contents[read];
      if (routes.repeat_of[read] >= 0) {
        repeat.reads.push_back(read);
      } else if (!content.saved && content.let_go >= 0 && content.call >= 0) {
        if (std::find(repeat.calls.begin(), repeat.calls.end(), content.call) !=
            repeat.calls.end()) {
          continue;
        }
        repeat.calls.push_back(content.call);
        pending.push_back(content.call);
      }
    }
  }
}

}  // namespace

Routes::Routes(const Simulator& simulator) {
  const Trace& trace = simulator.trace();
  repeat_of.assign(trace.contents.size(), -1);
  users.resize(trace.contents.size());
  std::vector<int32_t> repeat_of_call(trace.calls.size(), -1), calls;
  std::vector<int32_t> order;
  for (size_t i = 0; i < trace.contents.size(); ++i) {
    if (simulator.can_be_dropped(static_cast<int32_t>(i))) droppable.push_back(i);
  }
  order = droppable;
  std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) {
    return trace.contents[a].call < trace.contents[b].call;
  });
  for (const int32_t content : order) {
    const int32_t call = trace.contents[content].call;
    if (calls.empty() || calls.back() != call) {
      calls.push_back(call);
      repeats.emplace_back();
    }
    repeats.back().makes.push_back(content);
    repeat_of[content] = static_cast<int32_t>(repeats.size()) - 1;
  }
  std::vector<int32_t> seen(trace.contents.size(), -1);
  for (size_t i = 0; i < repeats.size(); ++i) {
    Repeat& repeat = repeats[i];
    follow(trace, *this, calls[i], seen, repeat);
    for (const int32_t read : repeat.reads) users[read].push_back(static_cast<int32_t>(i));
    repeat.seconds = trace.calls[calls[i]].seconds + kSecondsPerCall;
    for (const int32_t call : repeat.calls) {
      repeat.seconds += trace.calls[call].seconds + kSecondsPerCall;
    }
  }
}

}  // namespace memsave_ext::remat
