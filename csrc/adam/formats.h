// How parameters and states are stored, and which random numbers round them.
#pragma once

#include <cstdint>

#include "vector/types.h"

namespace memsave_ext::adam {

// A bfloat16 parameter can be more than its 16 bits.
enum class ParamFormat : int {
  kPlain,       // any type, rounded to nearest
  kStochastic,  // bfloat16, rounded up or down at random, so that it moves by the step on average
  kKahan,       // bfloat16 and what rounding took from it, as another bfloat16 (param_rest)
  kSplit,       // float, its upper half as a bfloat16, its lower as an int16 (param_rest)
};

enum class StateFormat : int {
  kAsParam,   // of the parameter's type, rounded to nearest
  kFloat,     // of any parameter but double
  kBFloat16,  // rounded at random, of float and 16-bit parameters
  kBlocks,    // 8 bits each and a float for every kBlock of them; likewise, without amsgrad
};

constexpr int64_t kBlock = 256;

inline int64_t blocks_of(int64_t numel) { return (numel + kBlock - 1) / kBlock; }

// Stochastic rounding adds 16 random bits below those that are kept, and cuts. Those of element i
// of a tensor are the (i % 8)-th 16 bits, from the lowest of the first word, of
// Philox4x32-10 (Salmon et al. 2011) with the optimizer's seed as key, low word first, and this
// counter: {i / 8, position of the parameter in the optimizer, step, what}.
enum class Draw : uint32_t { kParam = 0, kExpAvg = 1, kExpAvgSq = 2, kMaxExpAvgSq = 3 };

}  // namespace memsave_ext::adam
