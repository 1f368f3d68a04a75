// The types of tensors that kernels compute with, by torch's names; and macros that mark functions
// of host and device.
#pragma once

#include <torch/headeronly/core/ScalarType.h>

#include <cstdint>
#include <tuple>

#ifdef __CUDACC__
#define MEMSAVE_EXT_INLINE __host__ __device__ __forceinline__
#else
#define MEMSAVE_EXT_INLINE inline
#endif

namespace memsave_ext::vector {

using c10::BFloat16;
using c10::Half;
using c10::ScalarType;

// Tables of kernels are in this order.
constexpr ScalarType kTypes[] = {ScalarType::Double, ScalarType::Float, ScalarType::Half,
                                 ScalarType::BFloat16};
constexpr int kTypeCount = sizeof(kTypes) / sizeof(ScalarType);

constexpr bool is_computed(ScalarType type) {
  for (const ScalarType computed : kTypes) {
    if (computed == type) return true;
  }
  return false;
}

// Returns the place of one of kTypes.
constexpr int index_of(ScalarType type) {
  int index = 0;
  while (index < kTypeCount - 1 && kTypes[index] != type) ++index;
  return index;
}

// The C++ type in which values of a tensor are stored; CUDA has its own for those of 16 bits.
template <ScalarType type>
using StorageOf = std::tuple_element_t<index_of(type), std::tuple<double, float, Half, BFloat16>>;

// The type in which a stored value is computed.
template <typename Storage>
struct Computed {
  using type = float;
};
template <>
struct Computed<double> {
  using type = double;
};
template <typename Storage>
using ValueOf = typename Computed<Storage>::type;

constexpr int64_t item_size(ScalarType type) {
  return type == ScalarType::Double ? 8 : type == ScalarType::Float ? 4 : 2;
}

}  // namespace memsave_ext::vector
