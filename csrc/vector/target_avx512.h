// Opens the target region of AVX512, for code that runs on CPUs which report it. What is included
// in it, up to target_end.h, is compiled for it: standard headers must have been before.
#include <immintrin.h>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <type_traits>

#ifdef __clang__
#pragma clang attribute push(                                                    \
    __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c"))), \
    apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")
#endif
#define MEMSAVE_EXT_ISA avx512
#define MEMSAVE_EXT_VECTOR_BYTES 64
