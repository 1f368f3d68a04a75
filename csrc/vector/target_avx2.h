// Opens the target region of AVX2, for code that runs on CPUs which report it. What is included
// in it, up to target_end.h, is compiled for it: standard headers must have been before.
#include <immintrin.h>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <type_traits>

#ifdef __clang__
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
#endif
#define MEMSAVE_EXT_ISA avx2
#define MEMSAVE_EXT_VECTOR_BYTES 32
