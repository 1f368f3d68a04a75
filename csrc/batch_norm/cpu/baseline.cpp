// The passes for any CPU.
#include "vector/target_baseline.h"
//
#include "batch_norm/cpu/passes.h"

namespace memsave_ext::batch_norm::cpu {

const PassTable& baseline_passes = baseline::kPasses;

}  // namespace memsave_ext::batch_norm::cpu
