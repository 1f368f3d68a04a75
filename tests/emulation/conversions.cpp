// The stand-ins for cuda_fp16.h and cuda_bf16.h beside those of the toolkit: all 16-bit values, and
// floats of every exponent, halfway between two values and around.
#include "driver.h"
#include "reference/nvidia.h"

namespace emulation {
namespace {

void expect_same(const char* what, uint32_t given, uint32_t found, uint32_t expected) {
  ++checks;
  if (found != expected) fail("%s of %08x is %08x, NVIDIA's %08x", what, given, found, expected);
}

void widen(uint16_t bits) {
  expect_same("float of half", bits, __float_as_uint(__half2float(__ushort_as_half(bits))),
              __float_as_uint(nvidia_float_of_half(bits)));
  expect_same("float of bfloat16", bits,
              __float_as_uint(__bfloat162float(__ushort_as_bfloat16(bits))),
              __float_as_uint(nvidia_float_of_bfloat16(bits)));
}

void narrow(uint32_t bits) {
  const float x = __uint_as_float(bits);
  expect_same("half", bits, __float2half_rn(x).bits, nvidia_half(x));
  expect_same("bfloat16", bits, __float2bfloat16_rn(x).bits, nvidia_bfloat16(x));
}

}  // namespace
}  // namespace emulation

int main(int argc, char** argv) {
  using namespace emulation;
  const Options options = options_of(argc, argv);
  for (uint32_t bits = 0; bits < 65536; ++bits) {
    widen(static_cast<uint16_t>(bits));
    const uint32_t half = __float_as_uint(__half2float(__ushort_as_half(bits)));
    for (const uint32_t middle : {bits << 16, bits << 16 | 0x8000u, half, half + 0x1000u}) {
      for (uint32_t near = middle - 1; near != middle + 2; ++near) narrow(near);
    }
  }
  Generator generator(1);
  for (int i = 0; i < 1'000'000; ++i) narrow(static_cast<uint32_t>(generator()));
  finish(options, "conversions");
}
