// The loops for any CPU.
#include "vector/target_baseline.h"
//
#include "adam/cpu/vector_loops.h"

namespace memsave_ext::adam::cpu {

const Loops& baseline_loops = baseline::kLoops;

}  // namespace memsave_ext::adam::cpu
