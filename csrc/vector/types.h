// Types of tensors as kernels see them, and marks for functions of host and device.
#pragma once

#include <cstdint>

#ifdef __CUDACC__
#define MEMSAVE_EXT_INLINE __host__ __device__ __forceinline__
#else
#define MEMSAVE_EXT_INLINE inline
#endif

namespace memsave_ext::vector {

enum class DType : int { kDouble, kFloat, kHalf, kBFloat16 };

inline int64_t item_size(DType dtype) {
  return dtype == DType::kDouble ? 8 : dtype == DType::kFloat ? 4 : 2;
}

// What a stored value is computed in.
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

// On CPUs; CUDA has its own.
struct Half {
  uint16_t bits;
};

struct BFloat16 {
  uint16_t bits;
};

}  // namespace memsave_ext::vector
