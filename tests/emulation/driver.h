// What the drivers share: operands in memory of exactly their size, and comparisons.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <random>
#include <vector>

#include "cuda_bf16.h"
#include "cuda_fp16.h"
#include "device.h"

#ifdef EMULATION_MEMORY
#include <sanitizer/msan_interface.h>
#endif

namespace emulation {

// What a value is stored as. Bits: any, of 2 bytes and of 1.
enum class Stored { kDouble, kFloat, kHalf, kBFloat16, kBits16, kBits8 };

inline size_t bytes_of(Stored type) {
  return type == Stored::kDouble ? 8 : type == Stored::kFloat ? 4 : type == Stored::kBits8 ? 1 : 2;
}

// Values that begin `offset` values after an address which any vector may be loaded from. What is
// beside them is not theirs: in front, NaNs that nobody may write to, behind, the end of a block.
class Memory {
 public:
  Memory() = default;
  Memory(Stored type, size_t count, size_t offset = 0)
      : type_(type), count_(count), offset_(offset * bytes_of(type)) {
    block_.reset(new char[offset_ + count * bytes_of(type)]);  // not initialised
    memset(block_.get(), kInFront, offset_);
  }

  Memory copy() const {
    Memory other(type_, count_, offset_ / bytes_of(type_));
    memcpy(other.at(), at(), bytes());
    return other;
  }

  char* at() const { return block_ ? block_.get() + offset_ : nullptr; }
  Stored type() const { return type_; }
  size_t count() const { return count_; }
  size_t bytes() const { return count_ * bytes_of(type_); }

  double get(size_t i) const {
    const char* from = at() + i * bytes_of(type_);
    switch (type_) {
      case Stored::kDouble:
        return read<double>(from);
      case Stored::kFloat:
        return read<float>(from);
      case Stored::kHalf:
        return __half2float(read<__half>(from));
      case Stored::kBFloat16:
        return __bfloat162float(read<__nv_bfloat16>(from));
      case Stored::kBits16:
        return read<uint16_t>(from);
      case Stored::kBits8:
        return read<uint8_t>(from);
    }
    return 0;
  }

  void set(size_t i, double value) {
    char* to = at() + i * bytes_of(type_);
    switch (type_) {
      case Stored::kDouble:
        return write(to, value);
      case Stored::kFloat:
        return write(to, static_cast<float>(value));
      case Stored::kHalf:
        return write(to, __float2half_rn(static_cast<float>(value)));
      case Stored::kBFloat16:
        return write(to, __float2bfloat16_rn(static_cast<float>(value)));
      case Stored::kBits16:
        return write(to, static_cast<uint16_t>(value));
      case Stored::kBits8:
        return write(to, static_cast<uint8_t>(value));
    }
  }

  void require_nothing_in_front() const {
    for (size_t i = 0; block_ && i < offset_; ++i) {
      if (block_[i] != kInFront) fail("a byte in front of the values was written");
    }
  }

  // What code without MemorySanitizer has written.
  void written_elsewhere() const {
#ifdef EMULATION_MEMORY
    if (block_) __msan_unpoison(at(), bytes());
#endif
  }

 private:
  template <typename T>
  static T read(const char* from) {
    T value;
    memcpy(&value, from, sizeof(value));
    return value;
  }
  template <typename T>
  static void write(char* to, T value) {
    memcpy(to, &value, sizeof(value));
  }

  static constexpr char kInFront = -1;

  Stored type_ = Stored::kFloat;
  size_t count_ = 0, offset_ = 0;
  std::unique_ptr<char[]> block_;
};

// The first value whose bits differ, other than two NaN, or -1.
inline int64_t first_difference(const Memory& a, const Memory& b) {
  if (memcmp(a.at(), b.at(), a.bytes()) == 0) return -1;
  const size_t size = bytes_of(a.type());
  for (size_t i = 0; i < a.count(); ++i) {
    if (memcmp(a.at() + i * size, b.at() + i * size, size) == 0) continue;
    if (std::isnan(a.get(i)) && std::isnan(b.get(i))) continue;
    return static_cast<int64_t>(i);
  }
  return -1;
}

using Generator = std::mt19937_64;

inline double normal(Generator& generator) { return std::normal_distribution<double>()(generator); }

inline int below(Generator& generator, int count) {
  return static_cast<int>(generator() % static_cast<unsigned>(count));
}

// Values that were compared.
inline int64_t checks = 0;

// `driver [--large] [--one-order] [--part] FILE`: where each kernel that ran is written: its
// address and the most threads of a block. part: every kernel, but not with everything in every
// order.
struct Options {
  bool large = false, part = false;
  std::vector<Order> orders = {Order::kForward, Order::kReverse, Order::kRandom};
  const char* kernels = nullptr;
};
Options options_of(int argc, char** argv);
void finish(const Options& options, const char* what);

}  // namespace emulation
