// Tables of kernels, filled in the same way for every device, so that all support the same formats.
#pragma once

#include "adam/formats.h"

namespace memsave_ext::adam {

template <typename Kernel>
struct KernelTable {
  Kernel of[kCombinations];

  constexpr Kernel operator[](const Combination& combination) const {
    return of[combination.index()];
  }
};

// Fills the table's entries of combinations that exist and for which Source::makes(combination) is
// true: with Source::kernel<index>(), the kernel for Combination::at(index).
template <typename Source, int begin = 0, int end = kCombinations, typename Kernel>
constexpr void fill(KernelTable<Kernel>& table) {
  if constexpr (end - begin > 1) {
    constexpr int middle = begin + (end - begin) / 2;
    fill<Source, begin, middle>(table);
    fill<Source, middle, end>(table);
  } else {
    constexpr Combination combination = Combination::at(begin);
    if constexpr (combination.exists() && Source::makes(combination)) {
      table.of[begin] = Source::template kernel<begin>();
    }
  }
}

// Fills a table that is indexed by the type alone, with Source::kernel<type>().
template <typename Source, int dtype = 0, typename Kernel>
constexpr void fill(Kernel (&table)[vector::kTypeCount]) {
  if constexpr (dtype < vector::kTypeCount) {
    table[dtype] = Source::template kernel<vector::kTypes[dtype]>();
    fill<Source, dtype + 1>(table);
  }
}

}  // namespace memsave_ext::adam
