// The passes for AVX512, for CPUs that report it: nothing else is compiled in the target region.
#if defined(__x86_64__)
#include <immintrin.h>

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
#include "batch_norm/cpu_passes.h"
#ifdef __clang__
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

namespace memsave_ext::batch_norm::cpu {

const PassTable& avx512_passes = avx512::kPasses;

}  // namespace memsave_ext::batch_norm::cpu
#endif
