// A thread's way over its items.
#pragma once

#include <cstdint>

#include "batch_norm/cuda/partition.cuh"

namespace memsave_ext::batch_norm {

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
