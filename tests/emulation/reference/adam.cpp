// Adam's CPU kernels without torch, in a library of their own: they share names of inline functions
// with the kernels that they are compared with.
#define MEMSAVE_EXT_VECTOR_BYTES 32
#include "vector/target_begin.h"
//
#include "adam/cpu/vector_loops.h"
#include "vector/target_end.h"

// Of the instruction sets one is compiled: tests of the CPU kernels compare them.
namespace memsave_ext {
namespace vector {
enum class Isa { kBaseline, kAvx2, kAvx512 };
inline Isa isa_of_this_cpu() { return Isa::kAvx2; }
}  // namespace vector
namespace adam::cpu {
namespace baseline {
const Loops kLoops = avx2::kLoops;
}
namespace avx512 {
const Loops kLoops = avx2::kLoops;
}
}  // namespace adam::cpu
}  // namespace memsave_ext

#include "adam/cpu/kernels.cpp"
#include "adam/cpu/measure.cpp"
#include "reference.h"

namespace emulation {

const memsave_ext::adam::Kernels& adam_on_cpu() { return memsave_ext::adam::cpu_kernels; }

}  // namespace emulation
