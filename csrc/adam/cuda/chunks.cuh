// Which block of a launch works on which elements: tensors are cut into chunks of one length, and
// each block works on one chunk. For host and device, so that it can be checked without a device.
#pragma once

#include <cstdint>

#include "adam/math.h"

namespace memsave_ext::adam {

constexpr int64_t kShortestChunk = 2048;  // elements: some vectors for every thread of a block
constexpr int64_t kLongestChunk = 65536;

// Returns a chunk length that makes enough blocks for the largest devices, where there are enough
// elements.
inline int64_t chunk_length(int64_t elements) {
  constexpr int64_t kBlocks = 2048;
  int64_t length = kShortestChunk;
  while (length < kLongestChunk && length * kBlocks < elements) length *= 2;
  return length;
}

MEMSAVE_EXT_INLINE int64_t chunks_of(int64_t elements, int64_t length) {
  return (elements + length - 1) / length;
}

struct Chunk {
  int tensor;
  int64_t begin;  // its first element in the tensor
  int count;
};

// Returns chunk `index` of all tensors in a row. first_chunk of each tensor is the number of chunks
// before its own; tensors without elements are never found.
template <typename Tensor>
MEMSAVE_EXT_INLINE Chunk find_chunk(const Tensor* tensors, int count, int64_t length,
                                    uint32_t index) {
  int low = 0, high = count;  // the tensor is in [low, high)
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    (tensors[middle].first_chunk <= index ? low : high) = middle;
  }
  const int64_t begin = (index - tensors[low].first_chunk) * length;
  const int64_t left = tensors[low].numel - begin;
  return {low, begin, static_cast<int>(left < length ? left : length)};
}

}  // namespace memsave_ext::adam
