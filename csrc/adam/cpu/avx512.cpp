// The loops for AVX512.
#if defined(__x86_64__)
#include "vector/target_avx512.h"
//
#include "adam/cpu/vector_loops.h"
//
#include "vector/target_end.h"

namespace memsave_ext::adam::cpu {

const Loops& avx512_loops = avx512::kLoops;

}  // namespace memsave_ext::adam::cpu
#endif
