// Adam's CPU kernels without torch, in a library of their own: they share names of inline functions
// with the kernels that they are compared with.
#include "vector/target_avx2.h"
//
#include "adam/cpu/vector_loops.h"
#include "vector/target_end.h"
//
#include "adam/cpu/kernels.cpp"
#include "adam/cpu/measure.cpp"
#include "reference.h"

// Of the instruction sets one is compiled: tests of the CPU kernels compare them.
namespace memsave_ext::adam::cpu {
namespace baseline {
const Loops kLoops = avx2::kLoops;
}
namespace avx512 {
const Loops kLoops = avx2::kLoops;
}
}  // namespace memsave_ext::adam::cpu

memsave_ext::vector::Isa memsave_ext::vector::isa_of_this_cpu() { return Isa::kAvx2; }

namespace emulation {

const memsave_ext::adam::Kernels& adam_on_cpu() { return memsave_ext::adam::cpu_kernels; }

}  // namespace emulation
