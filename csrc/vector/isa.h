// Tables of functions that are compiled once for each instruction set (target_begin.h), in a
// namespace named after it.
#pragma once

#ifndef MEMSAVE_EXT_ISA  // outside of target regions

#include <ATen/Version.h>

#include <string>

namespace memsave_ext::vector {

enum class Isa { kBaseline, kAvx2, kAvx512 };

// Returns what kernels may use on this CPU: what torch chose, so that ATEN_CPU_CAPABILITY limits
// both.
inline Isa isa_of_this_cpu() {
  const std::string capability = at::get_cpu_capability();
  return capability == "AVX512" ? Isa::kAvx512 : capability == "AVX2" ? Isa::kAvx2 : Isa::kBaseline;
}

}  // namespace memsave_ext::vector

#endif

#define MEMSAVE_EXT_DECLARE_TABLE(isa, Table, name) \
  namespace isa {                                   \
  extern const Table name;                          \
  }

// The first macro declares the tables of that name, the second picks the one for this CPU.
#if defined(__x86_64__)
#define MEMSAVE_EXT_DECLARE_TABLES(Table, name)    \
  MEMSAVE_EXT_DECLARE_TABLE(baseline, Table, name) \
  MEMSAVE_EXT_DECLARE_TABLE(avx2, Table, name)     \
  MEMSAVE_EXT_DECLARE_TABLE(avx512, Table, name)
#define MEMSAVE_EXT_TABLE_OF_THIS_CPU(name)                         \
  (vector::isa_of_this_cpu() == vector::Isa::kAvx512 ? avx512::name \
   : vector::isa_of_this_cpu() == vector::Isa::kAvx2 ? avx2::name   \
                                                     : baseline::name)
#else
#define MEMSAVE_EXT_DECLARE_TABLES(Table, name) MEMSAVE_EXT_DECLARE_TABLE(baseline, Table, name)
#define MEMSAVE_EXT_TABLE_OF_THIS_CPU(name) baseline::name
#endif
