// The loops for AVX2.
#if defined(__x86_64__)
#include "vector/target_avx2.h"
//
#include "adam/cpu/vector_loops.h"
//
#include "vector/target_end.h"

namespace memsave_ext::adam::cpu {

const Loops& avx2_loops = avx2::kLoops;

}  // namespace memsave_ext::adam::cpu
#endif
