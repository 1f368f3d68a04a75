// The passes for AVX2, for CPUs that report it: nothing else is compiled in the target region.
#if defined(__x86_64__)
#include <immintrin.h>

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
#include "batch_norm/cpu_passes.h"
#ifdef __clang__
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

namespace memsave_ext::batch_norm::cpu {

const PassTable& avx2_passes = avx2::kPasses;

}  // namespace memsave_ext::batch_norm::cpu
#endif
