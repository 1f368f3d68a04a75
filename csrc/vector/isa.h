// Tables of functions that are compiled once for each instruction set (target_*.h), in a namespace
// named after it.
#pragma once

namespace memsave_ext::vector {

enum class Isa { kBaseline, kAvx2, kAvx512 };

// What kernels may use on this CPU.
Isa isa_of_this_cpu();

}  // namespace memsave_ext::vector

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
