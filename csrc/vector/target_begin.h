// Opens the target region of the instruction set whose vectors have MEMSAVE_EXT_VECTOR_BYTES bytes,
// for code that runs on CPUs which report it: 64 for AVX-512, 32 for AVX2, and 16 for what every
// x86-64 and aarch64 has. What is included in it, up to target_end.h, is compiled for it: standard
// headers must have been before.
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <type_traits>

#if MEMSAVE_EXT_VECTOR_BYTES == 64
#define MEMSAVE_EXT_ISA avx512
#ifdef __clang__
#pragma clang attribute push(                                                    \
    __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c"))), \
    apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")
#endif
#elif MEMSAVE_EXT_VECTOR_BYTES == 32
#define MEMSAVE_EXT_ISA avx2
#ifdef __clang__
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
#endif
#else
#include <c10/util/Half.h>
#define MEMSAVE_EXT_ISA baseline
#endif
