// NVIDIA's own conversions, from the host's side of their headers.
#pragma once

#include <cstdint>

#define EMULATION_EXPORT __attribute__((visibility("default")))

namespace emulation {

EMULATION_EXPORT uint16_t nvidia_half(float x);
EMULATION_EXPORT uint16_t nvidia_bfloat16(float x);
EMULATION_EXPORT float nvidia_float_of_half(uint16_t bits);
EMULATION_EXPORT float nvidia_float_of_bfloat16(uint16_t bits);

}  // namespace emulation
