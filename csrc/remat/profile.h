// The memory of a step by slot, and what of it is over a level.
#pragma once

#include <cstdint>
#include <vector>

namespace memsave_ext::remat {

// Sums over many slots look at blocks of them.
class Profile {
 public:
  void set(const std::vector<int64_t>& memory, int64_t level);
  void set_level(int64_t level);

  int64_t level() const { return level_; }
  int64_t most() const;
  // By how much the sum of what is over the level falls where memory grows by `bytes` in the slots
  // [from, to).
  int64_t gain(int32_t from, int32_t to, int64_t bytes) const;
  void add(int32_t from, int32_t to, int64_t bytes);
  // Whether memory stays below the level where it grows by `bytes` > 0 in the slots [from, to).
  bool fits(int32_t from, int32_t to, int64_t bytes);

 private:
  static constexpr int32_t kSlots = 64;
  struct Block {
    int64_t least, most;
    int64_t over;   // the sum in it
    int64_t added;  // to all of its slots, besides what is in memory_
  };

  int32_t end_of(int32_t block) const;
  void update(int32_t block);
  int64_t gain_in(const Block& sums, int32_t from, int32_t to, int64_t bytes) const;

  int64_t level_ = 0;
  std::vector<int64_t> memory_;
  std::vector<Block> blocks_;
  int32_t tight_ = 0;  // a slot in which something did not fit
};

}  // namespace memsave_ext::remat
