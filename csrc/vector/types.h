// Element types as kernels see them, and macros that mark functions of host and device.
#pragma once

#include <cstdint>

#ifdef __CUDACC__
#define MEMSAVE_EXT_INLINE __host__ __device__ __forceinline__
#else
#define MEMSAVE_EXT_INLINE inline
#endif

namespace memsave_ext::vector {

enum class DType : int { kDouble, kFloat, kHalf, kBFloat16 };

constexpr int kDTypes = 4;

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

// The storage types of CPU kernels; CUDA has its own.
struct Half {
  uint16_t bits;
};

struct BFloat16 {
  uint16_t bits;
};

// The type in which values of a DType are stored.
template <DType dtype>
struct Stored;
template <>
struct Stored<DType::kDouble> {
  using type = double;
};
template <>
struct Stored<DType::kFloat> {
  using type = float;
};
template <>
struct Stored<DType::kHalf> {
  using type = Half;
};
template <>
struct Stored<DType::kBFloat16> {
  using type = BFloat16;
};
template <DType dtype>
using StorageOf = typename Stored<dtype>::type;

constexpr int64_t item_size(DType dtype) {
  constexpr int64_t sizes[kDTypes] = {sizeof(StorageOf<DType{0}>), sizeof(StorageOf<DType{1}>),
                                      sizeof(StorageOf<DType{2}>), sizeof(StorageOf<DType{3}>)};
  return sizes[static_cast<int>(dtype)];
}

}  // namespace memsave_ext::vector
