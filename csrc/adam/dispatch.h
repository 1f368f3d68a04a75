// Tables of kernels, filled in the same way for every device: what one steps, the others do.
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

// Source::makes(combination): whether it has kernels for those that exist of this kind; and
// Source::kernel<index>() is that for Combination::at(index).
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

// Likewise by DType alone: Source::kernel<dtype>().
template <typename Source, int dtype = 0, typename Kernel>
constexpr void fill(Kernel (&table)[vector::kDTypes]) {
  if constexpr (dtype < vector::kDTypes) {
    table[dtype] = Source::template kernel<static_cast<DType>(dtype)>();
    fill<Source, dtype + 1>(table);
  }
}

}  // namespace memsave_ext::adam
