// The step over vectors, for the instruction set whose target region this is included in.
//
// Every element goes through the same vector code, tails too, so that its result does not depend
// on where it stands.
#include "adam/cpu_steps.h"
#include "vector/cpu.h"

namespace memsave_ext::adam::cpu::MEMSAVE_EXT_ISA {

namespace isa = vector::MEMSAVE_EXT_ISA;
using vector::BFloat16;
using vector::Half;

struct Math {
  template <typename V>
  static MEMSAVE_EXT_INLINED V product(V a, V b) {
    V rounded = a * b;
#if defined(__x86_64__)
    asm("" : "+v"(rounded));  // out of the compiler's sight, which would fuse it with a sum
#elif defined(__aarch64__)
    asm("" : "+w"(rounded));
#endif
    return rounded;
  }

  template <typename V>
  static MEMSAVE_EXT_INLINED V fused(V a, V b, V c) {
    [[maybe_unused]] constexpr bool doubles = sizeof(a[0]) == 8;
#if MEMSAVE_EXT_VECTOR_BYTES == 64
    if constexpr (doubles) return (V)_mm512_fmadd_pd((__m512d)a, (__m512d)b, (__m512d)c);
    if constexpr (!doubles) return (V)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif MEMSAVE_EXT_VECTOR_BYTES == 32
    if constexpr (doubles) return (V)_mm256_fmadd_pd((__m256d)a, (__m256d)b, (__m256d)c);
    if constexpr (!doubles) return (V)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
    return a * b + c;
#endif
  }

  template <typename V>
  static MEMSAVE_EXT_INLINED V square_root(V v) {
    constexpr bool doubles = sizeof(v[0]) == 8;
#if MEMSAVE_EXT_VECTOR_BYTES == 64
    if constexpr (doubles) return (V)_mm512_maskz_sqrt_pd(0xff, (__m512d)v);
    if constexpr (!doubles) return (V)_mm512_maskz_sqrt_ps(isa::kAll, (__m512)v);
#elif MEMSAVE_EXT_VECTOR_BYTES == 32
    if constexpr (doubles) return (V)_mm256_sqrt_pd((__m256d)v);
    if constexpr (!doubles) return (V)_mm256_sqrt_ps((__m256)v);
#elif defined(__x86_64__)
    if constexpr (doubles) return (V)_mm_sqrt_pd((__m128d)v);
    if constexpr (!doubles) return (V)_mm_sqrt_ps((__m128)v);
#else
    constexpr int lanes = sizeof(V) / sizeof(v[0]);
    for (int i = 0; i < lanes; ++i) v[i] = doubles ? __builtin_sqrt(v[i]) : __builtin_sqrtf(v[i]);
    return v;
#endif
  }

  template <typename V>
  static MEMSAVE_EXT_INLINED V maximum(V a, V b) {
    const V larger = a > b ? a : b;
    return a != a ? a : larger;
  }
};

template <typename V>
struct Broadcast {
  MEMSAVE_EXT_INLINED V operator()(double value) const {
    return isa::broadcast<V>(static_cast<std::remove_reference_t<decltype(V{}[0])>>(value));
  }
};

// Hardware prefetching ends at each page, and five arrays leave it little to see of each.
template <typename T>
MEMSAVE_EXT_INLINED inline void prefetch(const T* from) {
  constexpr int64_t bytes_ahead = 1024;
  __builtin_prefetch(reinterpret_cast<const char*>(from) + bytes_ahead);
}

template <typename Param, typename State, bool amsgrad>
void step(const Item& item, int64_t begin, int64_t end, const Coefficients<double>& scalars) {
  using V = isa::Lanes<Param>;
  static_assert(std::is_same_v<V, isa::Lanes<State>>);
  constexpr int64_t lanes = isa::kLanes<Param>;
  const auto c = convert<V>(scalars, Broadcast<V>{});
  auto* const param = static_cast<Param*>(item.param);
  const auto* const grad = static_cast<const Param*>(item.grad);
  auto* const exp_avg = static_cast<State*>(item.exp_avg);
  auto* const exp_avg_sq = static_cast<State*>(item.exp_avg_sq);
  auto* const max_exp_avg_sq = static_cast<State*>(item.max_exp_avg_sq);
  const auto update_at = [&](int64_t i, auto size) MEMSAVE_EXT_INLINED {
    Values<V> x;
    x.param = isa::load(param + i, size);
    x.exp_avg = isa::load(exp_avg + i, size);
    x.exp_avg_sq = isa::load(exp_avg_sq + i, size);
    if constexpr (amsgrad) x.max_exp_avg_sq = isa::load(max_exp_avg_sq + i, size);
    update<Math, amsgrad>(c, isa::load(grad + i, size), x);
    isa::store(param + i, x.param, size);
    isa::store(exp_avg + i, x.exp_avg, size);
    isa::store(exp_avg_sq + i, x.exp_avg_sq, size);
    if constexpr (amsgrad) isa::store(max_exp_avg_sq + i, x.max_exp_avg_sq, size);
  };
  int64_t i = begin;
  for (; i + lanes <= end; i += lanes) {
    prefetch(param + i);
    prefetch(grad + i);
    prefetch(exp_avg + i);
    prefetch(exp_avg_sq + i);
    if constexpr (amsgrad) prefetch(max_exp_avg_sq + i);
    update_at(i, isa::Whole{});
  }
  if (i < end) update_at(i, isa::Part{end - i});
}

#define MEMSAVE_EXT_STEPS(Param, State) {step<Param, State, false>, step<Param, State, true>}
constexpr StepTable kSteps = {
    {MEMSAVE_EXT_STEPS(double, double), {}},
    {{}, MEMSAVE_EXT_STEPS(float, float)},
    {MEMSAVE_EXT_STEPS(Half, Half), MEMSAVE_EXT_STEPS(Half, float)},
    {MEMSAVE_EXT_STEPS(BFloat16, BFloat16), MEMSAVE_EXT_STEPS(BFloat16, float)}};
#undef MEMSAVE_EXT_STEPS

}  // namespace memsave_ext::adam::cpu::MEMSAVE_EXT_ISA
