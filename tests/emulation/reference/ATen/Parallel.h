// In place of torch's: one thread, which kernels promise to be the same.
#pragma once

#include <cstdint>

namespace at {

template <typename F>
void parallel_for(int64_t begin, int64_t end, int64_t, const F& f) {
  if (begin < end) f(begin, end);
}

}  // namespace at
