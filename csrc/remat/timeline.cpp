#include <algorithm>

#include "remat/simulate.h"

namespace memsave_ext::remat {
namespace {

// The contents whose memory the block may have to hold.
bool counts(const TraceContent& content) {
  return content.let_go >= 0 && (content.saved || content.call < 0);
}

}  // namespace

Timeline::Timeline(const Trace& trace) {
  const auto moments = static_cast<int32_t>(trace.moments.size());
  std::vector<uint8_t> is_bound(moments), is_opening(moments);
  for (const auto& content : trace.contents) {
    if (!counts(content)) continue;
    is_bound[content.let_go] = 1;
    if (content.opened >= 0) is_opening[content.opened] = 1;
    if (content.closed >= 0) is_bound[content.closed] = 1;
  }
  // By moment: the slot of the interval before it, and its own where it has one.
  std::vector<int32_t> before(moments), at(moments);
  bool is_new = true;
  for (int32_t i = 0; i < moments; ++i) {
    if (is_new) memory.push_back(trace.moments[i].peak);
    memory.back() = std::max(memory.back(), trace.moments[i].peak);
    before[i] = at[i] = size() - 1;
    is_new = is_bound[i] || is_opening[i];
    if (!is_opening[i]) continue;
    memory.push_back(trace.moments[i].now);
    at[i] = size() - 1;
  }
  spans.resize(trace.contents.size());
  for (size_t i = 0; i < spans.size(); ++i) {
    const auto& content = trace.contents[i];
    if (!counts(content)) continue;
    spans[i].kept_from = at[content.let_go] + 1;
    if (content.opened >= 0) spans[i].opened = at[content.opened];
    // Pinned ones are held until they are read last.
    if (content.saved) spans[i].until = content.closed >= 0 ? at[content.closed] : size() - 1;
    if (content.saved && content.opened >= 0) openings.push_back(static_cast<int32_t>(i));
  }
  std::stable_sort(openings.begin(), openings.end(),
                   [&](int32_t a, int32_t b) { return spans[a].opened < spans[b].opened; });
}

}  // namespace memsave_ext::remat
