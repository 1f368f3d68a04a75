// Code for any CPU, with the 16-byte vectors that every x86-64 and aarch64 has.
#include <c10/util/Half.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <type_traits>

#define MEMSAVE_EXT_ISA baseline
#define MEMSAVE_EXT_VECTOR_BYTES 16
