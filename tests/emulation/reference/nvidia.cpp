#include "nvidia.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstring>

namespace emulation {

template <typename To, typename From>
static To bits_as(const From& from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  memcpy(&to, &from, sizeof(to));
  return to;
}

uint16_t nvidia_half(float x) { return bits_as<uint16_t>(__float2half_rn(x)); }
uint16_t nvidia_bfloat16(float x) { return bits_as<uint16_t>(__float2bfloat16_rn(x)); }
float nvidia_float_of_half(uint16_t bits) { return __half2float(bits_as<__half>(bits)); }
float nvidia_float_of_bfloat16(uint16_t bits) {
  return __bfloat162float(bits_as<__nv_bfloat16>(bits));
}

}  // namespace emulation
