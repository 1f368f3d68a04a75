#include "remat/segments.h"

#include <algorithm>

namespace memsave_ext::remat {

std::vector<Decision> drop_within_segments(const Trace& trace, const Routes& routes, int segments) {
  const auto repeats = static_cast<int32_t>(routes.repeats.size());
  // By repeat: the bytes made so far, and those of them that later repeats read.
  std::vector<int64_t> made(repeats + 1), crossing(repeats + 1);
  std::vector<int32_t> last(trace.contents.size(), -1);
  for (const int32_t content : routes.droppable) {
    for (const int32_t user : routes.users[content]) last[content] = std::max(last[content], user);
    const int32_t from = routes.repeat_of[content];
    const int64_t bytes = trace.contents[content].bytes;
    made[from] += bytes;
    crossing[from] += bytes;
    crossing[std::max(last[content], from)] -= bytes;
  }
  for (int32_t i = 1; i <= repeats; ++i) {
    made[i] += made[i - 1];
    crossing[i] += crossing[i - 1];
  }
  // A segment ends where few bytes cross, within half a segment of its share of the bytes.
  std::vector<int32_t> segment_of(repeats);
  int32_t cut = -1;
  for (int i = 1; i < segments; ++i) {
    const auto share = [&](double position) {
      const double bytes = static_cast<double>(made[repeats]) * position / segments;
      return static_cast<int32_t>(
          std::lower_bound(made.begin(), made.end(), static_cast<int64_t>(bytes)) - made.begin());
    };
    const int32_t from = std::max(cut + 1, share(i - 0.5));
    const int32_t to = std::min(share(i + 0.5), repeats - 1);
    if (from >= to) continue;
    cut = static_cast<int32_t>(std::min_element(crossing.begin() + from, crossing.begin() + to) -
                               crossing.begin());
    for (int32_t repeat = cut + 1; repeat < repeats; ++repeat) ++segment_of[repeat];
  }
  std::vector<Decision> decisions(trace.contents.size(), Decision::kKeep);
  for (const int32_t content : routes.droppable) {
    const int32_t own = segment_of[routes.repeat_of[content]];
    const bool crosses = last[content] >= 0 && segment_of[last[content]] > own;
    if (!crosses) decisions[content] = Decision::kDrop;
  }
  return decisions;
}

}  // namespace memsave_ext::remat
