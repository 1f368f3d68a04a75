// Which block and thread works on which part of a tensor. That depends on the shape alone, so that
// results are the same in every run. Channels first (inner > 1): a block takes a chunk of one
// channel, whose items are vectors. Channels last (inner == 1): a block takes a chunk of the rows
// of a group of channels, lanes_x vectors wide, whose items are rows. All of it compiles for the
// host, too, so that it can be checked there.
#pragma once

#include <algorithm>
#include <climits>
#include <cstdint>
#include <stdexcept>

#include "batch_norm/kernels.h"

namespace memsave_ext::batch_norm {

constexpr int kThreads = 256;  // per block; fewer where lanes_x does not divide it

// Offsets are in vectors. They have 64 bits, because tensors can have more than 2^31 values.
struct Partition {
  int64_t width;      // vectors in a plane or row
  int64_t stride;     // vectors from one plane or row to the next
  int64_t items;      // items of a channel
  int64_t units;      // channels first: channels; channels last: groups of channels
  int64_t per_chunk;  // items in a chunk; the last may have fewer
  int64_t chunks;     // chunks of a unit
  int lanes_x;        // threads side by side in a row; 1 if channels first
  int lanes_y;        // threads on different items
  // The step from an item of a thread to its next one. Channels first: step_within is its part
  // inside the plane; where it leaves the plane, `wrap` is added to the offset.
  int64_t step_offset;
  int64_t wrap;
  int step_within;

  int64_t blocks() const { return units * chunks; }
  int threads() const { return lanes_x * lanes_y; }
};

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

inline bool is_channels_last(const Problem& problem) { return problem.inner == 1; }

// Sets the steps; chunks and lanes must be set already.
inline void set_steps(Partition& p, bool channels_last) {
  if (p.per_chunk > INT_MAX / 2 || (!channels_last && p.width > INT_MAX / 2)) {
    throw std::runtime_error("memsave_ext: batch_norm: the tensor is too large");
  }
  p.step_offset =
      channels_last ? p.lanes_y * p.stride : p.lanes_y / p.width * p.stride + p.lanes_y % p.width;
  p.wrap = p.stride - p.width;
  p.step_within = channels_last ? 0 : static_cast<int>(p.lanes_y % p.width);
}

// Returns the partition for loads of `vector` values, which must divide the length of a plane or
// row. The tensor must not be empty.
inline Partition make_partition(const Problem& problem, int vector) {
  constexpr int64_t kBlocks = 2048;  // a few waves on the largest devices
  constexpr int64_t kPerThread = 4;  // items; with fewer, a block costs more than its work
  const bool channels_last = is_channels_last(problem);
  Partition p;
  p.width = (channels_last ? problem.channels : problem.inner) / vector;
  p.stride = channels_last ? p.width : p.width * problem.channels;
  p.items = channels_last ? problem.outer : problem.outer * p.width;
  p.lanes_x = channels_last ? static_cast<int>(ceil_div(p.width, ceil_div(p.width, 32))) : 1;
  p.lanes_y = kThreads / p.lanes_x;
  p.units = channels_last ? ceil_div(p.width, p.lanes_x) : problem.channels;
  const int64_t wanted =
      std::min(ceil_div(kBlocks, p.units), ceil_div(p.items, p.lanes_y * kPerThread));
  p.per_chunk = ceil_div(p.items, wanted);
  p.chunks = ceil_div(p.items, p.per_chunk);
  set_steps(p, channels_last);
  return p;
}

// Returns a partition, channels first, in which each block, of `threads` threads, has a whole
// channel.
inline Partition make_whole(const Problem& problem, int vector, int threads) {
  Partition p = make_partition(problem, vector);
  p.per_chunk = p.items;
  p.chunks = 1;
  p.lanes_y = threads;
  set_steps(p, false);
  return p;
}

struct Quotient {
  int64_t quotient, remainder;
};

MEMSAVE_EXT_INLINE Quotient divide(int64_t a, int64_t b) {
  if (((a | b) >> 32) == 0) {  // a 64-bit division takes some hundred instructions
    const uint32_t x = static_cast<uint32_t>(a), y = static_cast<uint32_t>(b);
    return {x / y, x % y};
  }
  return {a / b, a % b};
}

// Walks over the items of a thread. `item` and `end` count from the first item of the chunk.
template <bool channels_last>
struct Walk {
  int item, end;
  int64_t offset;  // of the item in the tensor, in vectors
  int64_t chunk;
  int64_t column;  // channels first: the channel; channels last: the vector in a row
  int within;      // channels first: the vector in the plane

  MEMSAVE_EXT_INLINE Walk(const Partition& p, uint32_t block, int thread) {
    const Quotient at = divide(block, p.units);
    chunk = at.quotient;
    const int64_t begin = chunk * p.per_chunk;
    const int64_t left = p.items - begin;
    end = static_cast<int>(left < p.per_chunk ? left : p.per_chunk);
    if constexpr (channels_last) {
      item = thread / p.lanes_x;
      column = at.remainder * p.lanes_x + (thread - item * p.lanes_x);
      offset = (begin + item) * p.stride + column;
      within = 0;
      if (!has_channel(p)) end = 0;
    } else {
      item = thread;
      column = at.remainder;
      const Quotient place = divide(begin + thread, p.width);
      within = static_cast<int>(place.remainder);
      offset = place.quotient * p.stride + column * p.width + within;
    }
  }

  MEMSAVE_EXT_INLINE bool more() const { return item < end; }

  MEMSAVE_EXT_INLINE void next(const Partition& p) {
    item += p.lanes_y;
    offset += p.step_offset;
    if constexpr (!channels_last) {
      const int width = static_cast<int>(p.width);
      within += p.step_within;
      if (within >= width) {
        within -= width;
        offset += p.wrap;
      }
    }
  }

  // Whether the thread has a channel: the last group of channels may be narrower than its block.
  MEMSAVE_EXT_INLINE bool has_channel(const Partition& p) const {
    return !channels_last || column < p.width;
  }

  // Returns the offset of the channel's first item.
  MEMSAVE_EXT_INLINE int64_t first(const Partition& p) const {
    return channels_last ? column : column * p.width;
  }
};

}  // namespace memsave_ext::batch_norm
