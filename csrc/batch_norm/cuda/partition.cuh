// Which block and thread works on which part of a tensor, and a thread's way over its items. That
// depends on the shape and on how
// vectors lie in it, so that results are the same in every run. Channels first (inner > 1): a block
// takes a chunk of one channel, whose items are vectors. Channels last (inner == 1): a block takes
// a chunk of the rows of a group of channels, lanes_x vectors wide, whose items are rows. All of it
// compiles for the host, too, so that it can be checked there.
#pragma once

#include <algorithm>
#include <climits>
#include <cstdint>
#include <initializer_list>
#include <stdexcept>

#include "batch_norm/kernels.h"

namespace memsave_ext::batch_norm {

constexpr int kThreads = 256;  // per block; fewer where lanes_x does not divide it

// How the tensors of a launch are loaded and stored: by vectors of `vector` values, aligned to
// their size. Either these divide every plane or row; or they are masked: a plane or row begins and
// ends anywhere in a vector, whose other values are then those of its neighbours. All tensors begin
// at the same place of a vector.
struct Loads {
  int vector;
  bool masked = false;
  int begin = 0;  // the place of a tensor's first value in its vector; 0 unless masked
};

// Offsets are in vectors. They have 64 bits, because tensors can have more than 2^31 values.
struct Partition {
  int64_t width;      // vectors in a plane or row; masked: as many as cover it wherever it begins
  int64_t length;     // values of a plane; channels last, of a row or, masked, of a group
  int64_t stride;     // from one plane or row to the next, in vectors; masked: in values
  int64_t items;      // items of a channel
  int64_t units;      // channels first: channels; channels last: groups of channels
  int64_t per_chunk;  // items in a chunk; the last may have fewer
  int64_t chunks;     // chunks of a unit
  int lanes_x;        // threads side by side in a row; 1 if channels first
  int lanes_y;        // threads on different items
  // The step from an item of a thread to its next one, in units of `stride`. Channels first:
  // step_within is its part inside the plane; where it leaves the plane, `wrap` is added.
  int64_t step_offset;
  int64_t wrap;
  int step_within;
  // Masked: the values of a row, in all its groups; where in the tensor the last whole vector can
  // begin; and Loads::begin.
  int64_t row;
  int64_t last_whole;
  int begin;

  int64_t blocks() const { return units * chunks; }
  int threads() const { return lanes_x * lanes_y; }
  MEMSAVE_EXT_INLINE bool has_whole(int64_t vector) const {
    return vector >= 0 && vector <= last_whole;
  }
};

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

inline bool is_channels_last(const Problem& problem) { return problem.inner == 1; }

// Returns the values of a plane or row.
inline int64_t length_of(const Problem& problem) {
  return is_channels_last(problem) ? problem.channels : problem.inner;
}

// Returns the vector widths, in values, that have kernels; the widest first. Values of 16 bits also
// have one of 8 bytes, because planes of 14 * 14 are common. Doubles are loaded one at a time,
// which makes a warp's loads wide enough.
inline std::initializer_list<int> vectors(DType dtype) {
  static constexpr std::initializer_list<int> kOfDouble = {1}, kOfFloat = {4, 1},
                                              kOfHalf = {8, 4, 1};
  return dtype == DType::kDouble ? kOfDouble : dtype == DType::kFloat ? kOfFloat : kOfHalf;
}

// Whether the widest vectors can be masked. Shorter planes and rows than one have more of such
// vectors than they are worth.
inline bool can_mask(const Problem& problem) {
  const int widest = *vectors(problem.dtype).begin();
  return widest > 1 && length_of(problem) >= widest;
}

// Returns the vectors that cover `length` values wherever they begin.
constexpr int64_t covering(int64_t length, int vector) {
  return ceil_div(length + vector - 1, vector);
}

// Sets the steps; chunks and lanes must be set already.
inline void set_steps(Partition& p, bool channels_last, bool masked) {
  const int64_t in_plane = masked ? p.length : p.width;
  if (p.per_chunk > INT_MAX / 2 || (!channels_last && in_plane > INT_MAX / 2)) {
    throw std::runtime_error("memsave_ext: batch_norm: the tensor is too large");
  }
  p.step_within = channels_last ? 0 : static_cast<int>(p.lanes_y % p.width);
  p.step_offset = (channels_last ? p.lanes_y : p.lanes_y / p.width) * p.stride;
  p.wrap = p.stride;
  if (masked) return;  // the vector in the plane is added where it is used
  p.step_offset += p.step_within;
  p.wrap -= p.width;
}

// Sets lanes, items and units, channels last. Masked: a group of channels begins a whole number of
// vectors behind the row's first value; and lanes_y is a multiple of a vector's size, so that all
// rows of a thread begin at the same place of a vector, and its channels stay the same.
inline void set_lanes(Partition& p, const Problem& problem, const Loads& loads) {
  if (loads.masked) {
    constexpr int64_t kMost = 31;  // vectors of a group, which one more may be needed to cover
    const bool one = covering(problem.channels, loads.vector) <= kMost + 1;
    const int64_t groups = one ? 1 : ceil_div(problem.channels, kMost * loads.vector);
    const int64_t even = ceil_div(ceil_div(problem.channels, groups), loads.vector) * loads.vector;
    p.length = one ? problem.channels : even;
    p.units = ceil_div(problem.channels, p.length);
    p.width = covering(p.length, loads.vector);
    p.lanes_x = static_cast<int>(p.width);
    p.lanes_y = kThreads / p.lanes_x / loads.vector * loads.vector;
  } else {
    p.width = problem.channels / loads.vector;
    p.length = problem.channels;
    p.lanes_x = static_cast<int>(ceil_div(p.width, ceil_div(p.width, 32)));
    p.lanes_y = kThreads / p.lanes_x;
    p.units = ceil_div(p.width, p.lanes_x);
  }
  p.items = problem.outer;
}

// Returns the partition for these loads. The tensor must not be empty.
inline Partition make_partition(const Problem& problem, const Loads& loads) {
  constexpr int64_t kBlocks = 2048;  // a few waves on the largest devices
  constexpr int64_t kPerThread = 4;  // items; with fewer, a block costs more than its work
  const bool channels_last = is_channels_last(problem);
  Partition p;
  if (channels_last) {
    set_lanes(p, problem, loads);
  } else {
    p.length = problem.inner;
    p.width = loads.masked ? covering(p.length, loads.vector) : p.length / loads.vector;
    p.lanes_x = 1;
    p.lanes_y = kThreads;
    p.units = problem.channels;
    p.items = problem.outer * p.width;
  }
  const int64_t values = length_of(problem) * (channels_last ? 1 : problem.channels);
  p.stride = loads.masked ? values : values / loads.vector;
  p.row = length_of(problem);
  p.last_whole = problem.outer * values - loads.vector;
  p.begin = loads.begin;
  // Masked and channels last, a thread loads each of its channels' coefficients by itself.
  const int64_t per_thread = channels_last && loads.masked ? 2 * kPerThread : kPerThread;
  const int64_t wanted =
      std::min(ceil_div(kBlocks, p.units), ceil_div(p.items, p.lanes_y * per_thread));
  p.per_chunk = ceil_div(p.items, wanted);
  p.chunks = ceil_div(p.items, p.per_chunk);
  set_steps(p, channels_last, loads.masked);
  return p;
}

// Returns a partition, channels first, in which each block, of `threads` threads, has a whole
// channel.
inline Partition make_whole(const Problem& problem, const Loads& loads, int threads) {
  Partition p = make_partition(problem, loads);
  p.per_chunk = p.items;
  p.chunks = 1;
  p.lanes_y = threads;
  set_steps(p, false, loads.masked);
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

// The vector of an item. `mask` has a bit for each of its values, set for those of the item; none
// is where there is nothing to do, and then some vector can be loaded from `offset` all the same.
struct Place {
  // From the tensor's first value, in vectors; masked: in values, and negative where the tensor
  // begins in the midst of the vector.
  int64_t offset;
  uint32_t mask;
  int item;

  MEMSAVE_EXT_INLINE bool there() const { return mask != 0; }
};

// The channels of a thread: from `first` on, those whose bit in `mask` is set.
struct Channels {
  int64_t first;
  uint32_t mask;

  MEMSAVE_EXT_INLINE bool has(int i) const { return (mask >> i & 1) != 0; }
};

// Walks over the items of a thread. `item` and `end` count from the first item of the chunk.
template <bool channels_last, int vector>
struct WholeWalk {
  int item, end;
  int64_t offset;  // of the item in the tensor, in vectors
  int64_t chunk;
  int64_t column;  // channels first: the channel; channels last: the vector in a row
  int within;      // channels first: the vector in the plane

  MEMSAVE_EXT_INLINE WholeWalk(const Partition& p, uint32_t block, int thread) {
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

  MEMSAVE_EXT_INLINE Place place(const Partition&) const { return {offset, ~0u, item}; }

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

  MEMSAVE_EXT_INLINE Channels channels(const Partition&) const {
    return {channels_last ? column * vector : column, ~0u};
  }
};

// The same for masked vectors.
template <bool channels_last, int vector>
struct MaskedWalk {
  static constexpr uint32_t kAll = (1u << vector) - 1;

  int item, end;
  int64_t start;  // of the item's plane or row in the tensor, in values
  int64_t chunk;
  int64_t column;  // the channel or group of channels
  int within;      // which of the vectors that cover the plane or row
  int length;      // values of the plane or row

  MEMSAVE_EXT_INLINE MaskedWalk(const Partition& p, uint32_t block, int thread) {
    const Quotient at = divide(block, p.units);
    chunk = at.quotient;
    column = at.remainder;
    const int64_t begin = chunk * p.per_chunk;
    const int64_t left = p.items - begin;
    end = static_cast<int>(left < p.per_chunk ? left : p.per_chunk);
    start = column * p.length;
    length = static_cast<int>(p.length);
    if constexpr (channels_last) {
      item = thread / p.lanes_x;
      within = thread - item * p.lanes_x;
      const int64_t channels = p.row - start;
      if (channels < p.length) length = static_cast<int>(channels);
      start += (begin + item) * p.stride;
      if (!has_channel(p)) end = 0;
    } else {
      item = thread;
      const Quotient place = divide(begin + thread, p.width);
      within = static_cast<int>(place.remainder);
      start += place.quotient * p.stride;
    }
  }

  MEMSAVE_EXT_INLINE bool more() const { return item < end; }

  MEMSAVE_EXT_INLINE Place place(const Partition& p) const {
    // Of the vectors that cover a plane only the last can be one too many; the one before is not.
    const int in_plane = lead(p) < length ? lead(p) : lead(p) - vector;
    return {start + in_plane, mask(p), item};
  }

  MEMSAVE_EXT_INLINE void next(const Partition& p) {
    item += p.lanes_y;
    start += p.step_offset;
    if constexpr (!channels_last) {
      const int width = static_cast<int>(p.width);
      within += p.step_within;
      if (within >= width) {
        within -= width;
        start += p.wrap;
      }
    }
  }

  MEMSAVE_EXT_INLINE bool has_channel(const Partition& p) const {
    return !channels_last || mask(p) != 0;
  }

  MEMSAVE_EXT_INLINE Channels channels(const Partition& p) const {
    if constexpr (!channels_last) return {column, ~0u};
    return {column * p.length + lead(p), mask(p)};
  }

  // Returns where in the plane or row the vector begins; it may begin before it.
  MEMSAVE_EXT_INLINE int lead(const Partition& p) const {
    return within * vector - ((static_cast<int>(start & (vector - 1)) + p.begin) & (vector - 1));
  }

  MEMSAVE_EXT_INLINE uint32_t mask(const Partition& p) const {
    const int before = lead(p) < 0 ? -lead(p) : 0;
    const int after = lead(p) + vector - length;
    return kAll << before & kAll >> (after < 0 ? 0 : after < vector ? after : vector);
  }
};

// Takes the walk's next places, as many as there are; loading from one of them twice costs less
// than a branch. There must be one.
template <typename Walk, int count>
MEMSAVE_EXT_INLINE void take(Walk& walk, const Partition& p, Place (&places)[count]) {
  const int64_t first = walk.place(p).offset;
#pragma unroll
  for (int u = 0; u < count; ++u) {
    places[u] = walk.more() ? walk.place(p) : Place{first, 0, 0};
    walk.next(p);
  }
}

}  // namespace memsave_ext::batch_norm
