#include "remat/profile.h"

#include <algorithm>

namespace memsave_ext::remat {

void Profile::set(const std::vector<int64_t>& memory, int64_t level) {
  memory_ = memory;
  blocks_.assign((memory.size() + kSlots - 1) / kSlots, {});
  tight_ = 0;
  set_level(level);
}

void Profile::set_level(int64_t level) {
  level_ = level;
  for (size_t block = 0; block < blocks_.size(); ++block) update(static_cast<int32_t>(block));
}

int64_t Profile::most() const {
  int64_t most = 0;
  for (const auto& block : blocks_) most = std::max(most, block.most);
  return most;
}

int32_t Profile::end_of(int32_t block) const {
  return std::min((block + 1) * kSlots, static_cast<int32_t>(memory_.size()));
}

void Profile::update(int32_t block) {
  const int32_t from = block * kSlots, to = end_of(block);
  const int64_t added = blocks_[block].added;
  Block sums = {memory_[from], memory_[from], 0, added};
  for (int32_t slot = from; slot < to; ++slot) {
    sums.least = std::min(sums.least, memory_[slot]);
    sums.most = std::max(sums.most, memory_[slot]);
    sums.over += std::max<int64_t>(memory_[slot] + added - level_, 0);
  }
  sums.least += added;
  sums.most += added;
  blocks_[block] = sums;
}

int64_t Profile::gain_in(const Block& sums, int32_t from, int32_t to, int64_t bytes) const {
  int64_t gain = 0;
  for (int32_t slot = from; slot < to; ++slot) {
    const int64_t over = memory_[slot] + sums.added - level_;
    gain += std::max<int64_t>(over, 0) - std::max<int64_t>(over + bytes, 0);
  }
  return gain;
}

int64_t Profile::gain(int32_t from, int32_t to, int64_t bytes) const {
  int64_t gain = 0;
  while (from < to) {
    const int32_t block = from / kSlots;
    const int32_t end = std::min(end_of(block), to);
    const Block& sums = blocks_[block];
    if (sums.most <= level_ && sums.most + bytes <= level_) {
      // Nothing is over, before and after.
    } else if (sums.least >= level_ && sums.least + bytes >= level_) {
      gain -= bytes * (end - from);
    } else if (end - from == end_of(block) - block * kSlots && sums.most + bytes <= level_) {
      gain += sums.over;
    } else {
      gain += gain_in(sums, from, end, bytes);
    }
    from = end;
  }
  return gain;
}

void Profile::add(int32_t from, int32_t to, int64_t bytes) {
  while (from < to) {
    const int32_t block = from / kSlots;
    const int32_t end = std::min(end_of(block), to);
    Block& sums = blocks_[block];
    if (end - from == end_of(block) - block * kSlots) {
      sums.over -= gain(from, end, bytes);
      sums.added += bytes;
      sums.least += bytes;
      sums.most += bytes;
    } else {
      for (int32_t slot = from; slot < end; ++slot) memory_[slot] += bytes;
      update(block);
    }
    from = end;
  }
}

bool Profile::fits(int32_t from, int32_t to, int64_t bytes) {
  const auto is_over = [&](int32_t slot) {
    return memory_[slot] + blocks_[slot / kSlots].added + bytes > level_;
  };
  if (from <= tight_ && tight_ < to && is_over(tight_)) return false;
  while (from < to) {
    const int32_t block = from / kSlots;
    const int32_t end = std::min(end_of(block), to);
    for (; blocks_[block].most + bytes > level_ && from < end; ++from) {
      if (!is_over(from)) continue;
      tight_ = from;
      return false;
    }
    from = end;
  }
  return true;
}

}  // namespace memsave_ext::remat
