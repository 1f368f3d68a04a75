// The passes for AVX2.
#if defined(__x86_64__)
#include "vector/target_avx2.h"
//
#include "batch_norm/cpu/passes.h"
//
#include "vector/target_end.h"

namespace memsave_ext::batch_norm::cpu {

const PassTable& avx2_passes = avx2::kPasses;

}  // namespace memsave_ext::batch_norm::cpu
#endif
