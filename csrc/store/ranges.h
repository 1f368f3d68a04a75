// Which parts of a file or of memory are free.
#pragma once

#include <cstdint>
#include <iterator>
#include <map>
#include <optional>
#include <utility>

namespace memsave_ext::store {

// `Use`: what has to be over before a part is used again; of two uses the one that is less is over
// first. A lock is the caller's.
template <typename Use>
class Ranges {
 public:
  // Takes the smallest free part that is large enough. Returns where it begins, and its last use.
  std::optional<std::pair<int64_t, Use>> take(int64_t size) {
    auto best = free_.end();
    for (auto part = free_.begin(); part != free_.end(); ++part) {
      if (part->second.size < size) continue;
      if (best == free_.end() || part->second.size < best->second.size) best = part;
    }
    if (best == free_.end()) return std::nullopt;
    const int64_t offset = best->first;
    const Part part = best->second;
    free_.erase(best);
    if (part.size > size) free_.emplace(offset + size, Part{part.size - size, part.use});
    return std::pair(offset, part.use);
  }

  void give_back(int64_t offset, int64_t size, const Use& use = {}) {
    const auto here = free_.emplace(offset, Part{size, use}).first;
    const auto next = std::next(here);
    if (next != free_.end() && offset + size == next->first) join(here, next);
    if (here == free_.begin()) return;
    const auto before = std::prev(here);
    if (before->first + before->second.size == offset) join(before, here);
  }

 private:
  struct Part {
    int64_t size;
    Use use;
  };
  using Place = typename std::map<int64_t, Part>::iterator;

  void join(Place first, Place second) {
    first->second.size += second->second.size;
    if (first->second.use < second->second.use) first->second.use = second->second.use;
    free_.erase(second);
  }

  std::map<int64_t, Part> free_;  // by offset
};

}  // namespace memsave_ext::store
