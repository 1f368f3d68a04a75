// The passes for AVX512.
#if defined(__x86_64__)
#include "vector/target_avx512.h"
//
#include "batch_norm/cpu/passes.h"
//
#include "vector/target_end.h"

namespace memsave_ext::batch_norm::cpu {

const PassTable& avx512_passes = avx512::kPasses;

}  // namespace memsave_ext::batch_norm::cpu
#endif
