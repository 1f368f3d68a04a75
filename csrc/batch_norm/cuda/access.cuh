// How a kernel reads tensors and channel vectors.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "batch_norm/cuda/partition.cuh"
#include "batch_norm/kernels.h"
#include "vector/cuda.cuh"

namespace memsave_ext::batch_norm {

using vector::load;
using vector::narrow;
using vector::store;
using vector::ValueOf;
using vector::Vector;
using vector::widen;

template <typename Value>
struct Pair {
  Value first, second;
};

// A tensor of T, read `vector` values at a time. `channels_last`: the values of a vector belong to
// different channels (inner == 1); otherwise to one. `masked`: see Loads.
template <typename T, int vector, bool channels_last, bool masked>
struct Access {
  using Element = T;
  using Value = ValueOf<T>;
  using Vec = Vector<T, vector>;
  using Walk = std::conditional_t<masked, MaskedWalk<channels_last, vector>,
                                  WholeWalk<channels_last, vector>>;
  static constexpr bool kChannelsLast = channels_last;
  static constexpr bool kMasked = masked;
  static constexpr int kVector = vector;
  static constexpr int kChannels = channels_last ? vector : 1;  // channels per thread
  // Vectors loaded before the first is used. Masked ones need more registers each.
  static constexpr int kUnroll = vector == 1 ? 8 : masked ? 2 : 4;

  // The channel of the value at this place of a vector, counted among the thread's channels.
  static constexpr __device__ int channel(int value) { return channels_last ? value : 0; }
  // Returns what is added to the sums of a place of a vector: 0 where the place is not the item's,
  // by a choice, which costs less than a branch. Channels last, such places have sums of their own,
  // which nobody reads.
  static __device__ __forceinline__ Value keep(uint32_t mask, int place, Value x) {
    return !masked || channels_last || (mask >> place & 1) != 0 ? x : Value(0);
  }
};

template <typename A>
__device__ __forceinline__ typename A::Vec load_elements(const typename A::Element* from,
                                                         uint32_t mask) {
  typename A::Element elements[A::kVector];
  memset(elements, 0, sizeof(elements));
#pragma unroll
  for (int i = 0; i < A::kVector; ++i) {
    if (mask >> i & 1) elements[i] = from[i];
  }
  typename A::Vec vector;
  memcpy(&vector, elements, sizeof(vector));
  return vector;
}

template <typename A>
__device__ __forceinline__ void store_elements(typename A::Element* to, uint32_t mask,
                                               const typename A::Vec& vector) {
  typename A::Element elements[A::kVector];
  memcpy(elements, &vector, sizeof(vector));
#pragma unroll
  for (int i = 0; i < A::kVector; ++i) {
    if (mask >> i & 1) to[i] = elements[i];
  }
}

// Loads the vectors at all places. Values that are not of their item are any.
template <typename A, int count>
__device__ __forceinline__ void load_all(const void* from, const Partition& p,
                                         const Place (&places)[count],
                                         typename A::Vec (&to)[count]) {
  using Vec = typename A::Vec;
  if constexpr (!A::kMasked) {
#pragma unroll
    for (int u = 0; u < count; ++u) to[u] = load<Vec>(from, places[u].offset);
  } else {
    bool inside = true;
#pragma unroll
    for (int u = 0; u < count; ++u) inside = inside && p.has_whole(places[u].offset);
#pragma unroll
    for (int u = 0; u < count; ++u) {
      const auto* values = static_cast<const typename A::Element*>(from) + places[u].offset;
      if (inside) {
        to[u] = load<Vec>(values, 0);
      } else {  // what is before the tensor or behind it may not be read
        to[u] = load_elements<A>(values, places[u].mask);
      }
    }
  }
}

// Stores the values of the place's item; those beside them belong to others.
template <typename A>
__device__ __forceinline__ void store_at(void* to, const Place& place,
                                         const typename A::Vec& vector) {
  if constexpr (!A::kMasked) {
    store(to, place.offset, vector);
  } else {
    auto* values = static_cast<typename A::Element*>(to) + place.offset;
    if (place.mask == A::Walk::kAll) {
      store(values, 0, vector);
    } else {
      store_elements<A>(values, place.mask, vector);
    }
  }
}

// Loads a thread's channels of the dense channel vector `from` of type `Stored`. Where `from` is
// null, and where a channel is not the thread's, it is `fallback`.
template <typename A, typename Stored, typename Value, int count>
__device__ __forceinline__ void load_channels(const void* from, const Channels& channels,
                                              Value fallback, Value (&to)[count]) {
  if (from == nullptr) {
#pragma unroll
    for (int i = 0; i < count; ++i) to[i] = fallback;
    return;
  }
  const Stored* values = static_cast<const Stored*>(from) + channels.first;
  constexpr int kWide = count * sizeof(Stored) < 16 ? count : 16 / sizeof(Stored);
  if constexpr (count > 1 && !A::kMasked) {
    if (reinterpret_cast<uintptr_t>(values) % (kWide * sizeof(Stored)) == 0) {
#pragma unroll
      for (int i = 0; i < count; i += kWide) {
        const auto wide = load<Vector<Stored, kWide>>(values + i, 0);
#pragma unroll
        for (int j = 0; j < kWide; ++j) to[i + j] = wide[j];
      }
      return;
    }
  }
#pragma unroll
  for (int i = 0; i < count; ++i) {
    if (!A::kMasked || channels.has(i)) {
      to[i] = widen(values[i]);
    } else {
      to[i] = fallback;
    }
  }
}

// Returns a vector with the first value of each of the thread's channels.
template <typename A>
__device__ __forceinline__ typename A::Vec load_first(const void* input, const Partition& p,
                                                      const Channels& channels) {
  const int64_t first = A::kChannelsLast ? channels.first : channels.first * p.length;
  if constexpr (A::kMasked) {
    const auto* values = static_cast<const typename A::Element*>(input) + first;
    return load_elements<A>(values, A::kChannelsLast ? channels.mask : 1);
  } else {
    return load<typename A::Vec>(input, first / A::kVector);
  }
}

}  // namespace memsave_ext::batch_norm
