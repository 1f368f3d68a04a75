// All loops, for the instruction set whose target region this is included in.
#include "adam/cpu/loops.h"
#include "adam/cpu/squares.h"
#include "adam/cpu/vector_step.h"

namespace memsave_ext::adam::cpu::MEMSAVE_EXT_ISA {

constexpr Loops all_loops() {
  Loops loops{};
  fill<StepSource>(loops.steps);
  fill<FoldSource>(loops.folds);
  fill<SquaresSource>(loops.sum_squares);
  return loops;
}

constexpr Loops kLoops = all_loops();

}  // namespace memsave_ext::adam::cpu::MEMSAVE_EXT_ISA
