// All loops, for the instruction set whose target region this is included in.
#include "adam/cpu/blocks.h"
#include "adam/cpu/formats.h"
#include "adam/cpu/loops.h"
#include "adam/cpu/math.h"

namespace memsave_ext::adam::cpu::MEMSAVE_EXT_ISA {

// ---- the step ----
//
// Every element goes through the same vector code, tails too, so that its result does not depend on
// its place.

template <typename V>
struct Broadcast {
  MEMSAVE_EXT_INLINED V operator()(double value) const {
    return isa::broadcast<V>(static_cast<std::remove_reference_t<decltype(V{}[0])>>(value));
  }
};

// Calls f(i, size) for the vectors of the elements from begin to end.
template <int64_t lanes, typename F>
MEMSAVE_EXT_INLINED inline void for_each_vector(int64_t begin, int64_t end, const F& f) {
  int64_t i = begin;
  for (; i + lanes <= end; i += lanes) f(i, isa::Whole{});
  if (i < end) f(i, isa::Part{end - i});
}

// Param: Nearest or Short of cpu/formats.h.
template <typename Param, typename States, Rule rule>
__attribute__((flatten)) void step(const Item& item, int64_t begin, int64_t end,
                                   const Coefficients<double>& scalars) {
  using V = typename Param::Vector;
  static_assert(std::is_same_v<V, typename States::V>);
  using Value = std::remove_reference_t<decltype(V{}[0])>;
  using Grad = std::remove_pointer_t<decltype(Param::values)>;
  constexpr int64_t lanes = sizeof(V) / sizeof(Value);
  // A vector's codes are a long chain of operations, and so are its moments and its parameter: in
  // one loop too few vectors would be in flight.
  constexpr bool in_halves = States::kInBlocks && rule == Rule::kAdam;
  constexpr bool in_chunks = States::kInBlocks || Param::kRandom || States::kRandom;
  const auto c = convert<V>(scalars, Broadcast<V>{});
  const Param param(item.param, item.param_low_part);
  States states(item);
  Noise of_param, of_moments;
  // grad: the chunk's gradient. offset: of element i in the chunk.
  const auto update_at = [&](const Grad* grad, int64_t i, int64_t offset,
                             auto size) MEMSAVE_EXT_INLINED {
    Values<V> x;
    states.load(x, i, offset, size);
    if constexpr (in_halves) {
      if (c.decays_grad) x.param = param.load(i, size);
      adam_moments<Math>(c, isa::load(grad + offset, size), x);
    } else {
      x.param = param.load(i, size);
      update<Math, rule, States::kClamps>(c, isa::load(grad + offset, size), x);
      param.store(i, x.param, size, of_param.bits + offset);
    }
    states.store(x, i, offset, size, of_moments);
  };
  const auto update_param_at = [&](int64_t i, int64_t offset, auto size) MEMSAVE_EXT_INLINED {
    if constexpr (in_halves) {
      const V moved = adam_param<Math, States::kClamps>(
          c, param.load(i, size), states.new_exp_avg(offset), states.root(offset));
      param.store(i, moved, size, of_param.bits + offset);
    }
  };

  const auto* const grads = static_cast<const Grad*>(item.grad);
  const int64_t chunk = in_chunks ? kBlock : end - begin;
  for (int64_t from = begin; from < end; from += chunk) {
    const int64_t to = end - from < chunk ? end : from + chunk;
    const Grad* const grad = grads + from;
    if constexpr (Param::kRandom) draw(item, Draw::kParam, from, to, of_param);
    if constexpr (States::kRandom) draw(item, Draw::kMoments, from, to, of_moments);
    states.open(from, to);
    for_each_vector<lanes>(from, to, [&](int64_t i, auto size) MEMSAVE_EXT_INLINED {
      param.prefetch_at(i);
      prefetch(grad + (i - from));
      states.prefetch_at(i);
      update_at(grad, i, i - from, size);
    });
    states.close(from, to, of_moments, [&](int64_t begin, int64_t end) MEMSAVE_EXT_INLINED {
      for_each_vector<lanes>(begin, end, [&](int64_t offset, auto size) MEMSAVE_EXT_INLINED {
        update_param_at(from + offset, offset, size);
      });
    });
  }
}

struct StepSource {
  static constexpr bool makes(const Combination&) { return true; }

  template <int index>
  static constexpr Step kernel() {
    constexpr Combination c = Combination::at(index);
    using Storage = vector::StorageOf<c.param>;
    return step<Param<c.format, Storage>, States<c.states, Storage, row(c.rule).moments>, c.rule>;
  }
};

// ---- sums of squares ----

// Returns half the lanes as doubles: the lower half for 0, the upper for 1.
MEMSAVE_EXT_INLINED inline Doubles widen(isa::Lanes<float> v, int half) {
  isa::Vector<float, isa::kLanes<double>> halves[2];
  __builtin_memcpy(halves, &v, sizeof(v));
#if MEMSAVE_EXT_VECTOR_BYTES == 64  // gcc 12 compiles a conversion to more than this
  return (Doubles)_mm512_maskz_cvtps_pd(0xff, (__m256)halves[half]);
#elif MEMSAVE_EXT_VECTOR_BYTES == 32
  return (Doubles)_mm256_cvtps_pd((__m128)halves[half]);
#else
  return __builtin_convertvector(halves[half], Doubles);
#endif
}

MEMSAVE_EXT_INLINED inline Doubles widen(Doubles v, int) { return v; }

// Returns the sum of squares. On every instruction set, squares of values i, i + kSums, ... go into
// sum i. Squares of floats are exact as doubles, so that it does not matter whether sums are fused.
template <typename Storage>
__attribute__((flatten)) double sum_squares(const void* values, int64_t count) {
  constexpr int kSums = 16;
  constexpr int lanes = isa::kLanes<Storage>;
  constexpr int wide_lanes = isa::kLanes<double>;
  const auto* const from = static_cast<const Storage*>(values);
  Doubles sums[kSums / wide_lanes] = {};
  const auto add = [&](int64_t i, auto size_at) MEMSAVE_EXT_INLINED {
    for (int k = 0; k < kSums; k += lanes) {
      const auto v = isa::load(from + i + k, size_at(k));
      for (int half = 0; half < lanes / wide_lanes; ++half) {
        Doubles& sum = sums[k / wide_lanes + half];
        const Doubles wide = widen(v, half);
        sum = Math::fused(wide, wide, sum);
      }
    }
  };
  int64_t i = 0;
  for (; i + kSums <= count; i += kSums) add(i, [](int) { return isa::Whole{}; });
  if (i < count) {
    add(i, [&](int k) {
      const int64_t rest = count - i - k;
      return isa::Part{rest < 0 ? 0 : rest < lanes ? rest : lanes};
    });
  }
  double parts[kSums], total = 0;
  __builtin_memcpy(parts, sums, sizeof(parts));
  for (int k = 0; k < kSums; ++k) total += parts[k];
  return total;
}

struct SquaresSource {
  template <DType dtype>
  static constexpr SumSquares kernel() {
    return sum_squares<vector::StorageOf<dtype>>;
  }
};

// ---- all loops ----

constexpr Loops all_loops() {
  Loops loops{};
  fill<StepSource>(loops.steps);
  fill<SquaresSource>(loops.sum_squares);
  return loops;
}

constexpr Loops kLoops = all_loops();

}  // namespace memsave_ext::adam::cpu::MEMSAVE_EXT_ISA
