// The loops over vectors, for the instruction set whose target region this is included in.
#include "loss_head/cpu/functions.h"
#include "loss_head/cpu/loops.h"

namespace memsave_ext::loss_head::cpu::MEMSAVE_EXT_ISA {

// A token's logits in the chunk. caps: with a softcap. mixes: Chunk::mixes().
template <typename Storage, bool caps, bool mixes>
struct Row {
  using T = vector::ValueOf<Storage>;
  using V = isa::Lanes<Storage>;
  static constexpr int64_t kLanes = isa::kLanes<Storage>;

  Storage* logits;
  const T* probabilities;
  const T* class_weight;
  int64_t classes, target;  // target: in the chunk; -1: it is not
  T keep, spread, cap, per_cap;

  Row(const Chunk& chunk, int64_t token)
      : logits(static_cast<Storage*>(chunk.logits) + token * chunk.classes),
        probabilities(static_cast<const T*>(chunk.probabilities)),
        class_weight(static_cast<const T*>(chunk.class_weight)),
        classes(chunk.classes),
        target(-1),
        keep(static_cast<T>(chunk.keep)),
        spread(static_cast<T>(chunk.spread)),
        cap(static_cast<T>(chunk.softcap)),
        per_cap(static_cast<T>(1 / chunk.softcap)) {
    if (probabilities != nullptr) {
      probabilities += token * classes;
      return;
    }
    const int64_t place = chunk.target[token] - chunk.first;
    if (place >= 0 && place < classes) target = place;
  }

  // Calls body(i, size) for all vectors of the row; the last may be a part of one.
  template <typename Body>
  MEMSAVE_EXT_INLINED void each(const Body& body) const {
    int64_t i = 0;
    for (; i + kLanes <= classes; i += kLanes) body(i, isa::Whole{});
    if (i < classes) body(i, isa::Part{classes - i});
  }

  // Returns tanh(logit / cap), which is the logit over its cap; without one the logit itself.
  MEMSAVE_EXT_INLINED V bounded(V logit) const {
    if constexpr (caps) return hyperbolic_tangent(logit * per_cap);
    return logit;
  }
  MEMSAVE_EXT_INLINED V capped(V bounded) const {
    if constexpr (caps) return bounded * cap;
    return bounded;
  }

  // Returns what classes other than an index' share of the distribution have: a[c] without `keep`
  // of the target.
  template <typename Size>
  MEMSAVE_EXT_INLINED V distribution(int64_t i, Size size) const {
    V a = V{} + spread;
    if (probabilities != nullptr) a += keep * isa::load(probabilities + i, size);
    if (class_weight != nullptr) a *= isa::load(class_weight + i, size);
    return a;
  }
  // Returns the target's part of a[target].
  T of_target() const { return class_weight != nullptr ? keep * class_weight[target] : keep; }
  V target_logit() const { return isa::load(logits + target, isa::Part{1}); }
};

template <typename V>
MEMSAVE_EXT_INLINED inline auto largest(V v) {
  auto value = v[0];
  for (size_t i = 1; i < sizeof(V) / sizeof(value); ++i) value = v[i] > value ? v[i] : value;
  return value;
}

template <typename V>
MEMSAVE_EXT_INLINED inline V only(V v, V, isa::Whole) {
  return v;
}
template <typename V>
MEMSAVE_EXT_INLINED inline V only(V v, V other, isa::Part part) {
  using T = std::remove_reference_t<decltype(v[0])>;
  return isa::lanes_of<T, sizeof(V) / sizeof(T)>(part) ? v : other;
}

template <typename V>
MEMSAVE_EXT_INLINED inline V not_farther(V distance) {
  const V farthest = V{} + kFarthest;
  return distance > farthest ? distance : farthest;
}

template <typename Storage, bool caps, bool mixes, bool entropy>
__attribute__((flatten)) void reduce_token(const Chunk& chunk, vector::ValueOf<Storage>* sums,
                                           int64_t token) {
  using R = Row<Storage, caps, mixes>;
  using T = typename R::T;
  using V = typename R::V;
  const R row(chunk, token);
  T *maximum = sums + token, *sum = maximum + chunk.tokens, *dot = sum + chunk.tokens;
  constexpr T kNone = static_cast<T>(-__builtin_inf());
  V top = V{} + kNone;
  row.each([&](int64_t i, auto size) MEMSAVE_EXT_INLINED {
    const V logit = only(isa::load(row.logits + i, size), V{} + kNone, size);
    top = logit > top ? logit : top;
  });
  // The capped logits are in the same order.
  const T here = row.capped(row.bounded(V{} + largest(top)))[0];
  const T next = here > *maximum ? here : *maximum;
  const T base = next == kNone ? T{} : next;
  V total{}, product{}, moment{};
  row.each([&](int64_t i, auto size) MEMSAVE_EXT_INLINED {
    const V logit = row.capped(row.bounded(isa::load(row.logits + i, size)));
    const V distance = logit - base;
    const V power = isa::keep(exponential(distance), size);
    total += power;
    if constexpr (entropy) moment += power * not_farther(distance);
    if constexpr (mixes) product += isa::keep(logit * row.distribution(i, size), size);
  });
  const V moved = V{} + (*maximum - base);
  const T before = exponential(moved)[0];
  if constexpr (entropy) {
    T* const to = dot + chunk.tokens;
    *to = (*to + *sum * not_farther(moved)[0]) * before + static_cast<T>(isa::total(moment));
  }
  *sum = *sum * before + static_cast<T>(isa::total(total));
  *maximum = next;
  if constexpr (mixes) *dot += static_cast<T>(isa::total(product));
  if (row.target >= 0) {
    *dot += row.of_target() * row.capped(row.bounded(row.target_logit()))[0];
  }
}

template <typename Storage, bool caps, bool mixes, bool entropy>
__attribute__((flatten)) void gradient_token(const Chunk& chunk,
                                             const vector::ValueOf<Storage>* coefficients,
                                             int64_t token) {
  using R = Row<Storage, caps, mixes>;
  using T = typename R::T;
  using V = typename R::V;
  const R row(chunk, token);
  const T maximum = coefficients[token], log_sum = coefficients[chunk.tokens + token];
  const T of_softmax = coefficients[2 * chunk.tokens + token];
  const T of_target = coefficients[3 * chunk.tokens + token];
  const T of_entropy = entropy ? coefficients[4 * chunk.tokens + token] : T{0};
  if (of_softmax == 0 && of_target == 0 && of_entropy == 0) {
    __builtin_memset(row.logits, 0, row.classes * sizeof(Storage));
    return;
  }
  // of_a: what the token's distribution has to do with it.
  const auto gradient = [&](V logit, V of_a) MEMSAVE_EXT_INLINED {
    const V bounded = row.bounded(logit);
    const V distance = row.capped(bounded) - maximum - log_sum;
    V factor = V{} + of_softmax;
    if constexpr (entropy) factor += of_entropy * not_farther(distance);
    V value = factor * exponential(distance) - of_a;
    if constexpr (caps) value *= T{1} - bounded * bounded;
    return value;
  };
  const V at_target = row.target >= 0 ? row.target_logit() : V{};
  row.each([&](int64_t i, auto size) MEMSAVE_EXT_INLINED {
    V of_a{};
    if constexpr (mixes) of_a = of_target * row.distribution(i, size);
    isa::store(row.logits + i, gradient(isa::load(row.logits + i, size), of_a), size);
  });
  if (row.target < 0) return;
  V a = V{} + row.of_target();
  if constexpr (mixes) a += row.distribution(row.target, isa::Part{1});
  isa::store(row.logits + row.target, gradient(at_target, of_target * a), isa::Part{1});
}

template <typename Storage>
void reduce_loop(const Chunk& chunk, void* sums, int64_t begin, int64_t end) {
  auto* const values = static_cast<vector::ValueOf<Storage>*>(sums);
  with_kind(chunk, [&](auto caps, auto mixes, auto entropy) {
    for (int64_t token = begin; token < end; ++token) {
      reduce_token<Storage, caps, mixes, entropy>(chunk, values, token);
    }
  });
}

template <typename Storage>
void gradient_loop(const Chunk& chunk, const void* coefficients, int64_t begin, int64_t end) {
  const auto* const values = static_cast<const vector::ValueOf<Storage>*>(coefficients);
  with_kind(chunk, [&](auto caps, auto mixes, auto entropy) {
    for (int64_t token = begin; token < end; ++token) {
      gradient_token<Storage, caps, mixes, entropy>(chunk, values, token);
    }
  });
}

template <DType dtype>
constexpr Loops kLoopsOf = {reduce_loop<vector::StorageOf<dtype>>,
                            gradient_loop<vector::StorageOf<dtype>>};

constexpr AllLoops kAllLoops = {{kLoopsOf<DType::kDouble>, kLoopsOf<DType::kFloat>,
                                 kLoopsOf<DType::kHalf>, kLoopsOf<DType::kBFloat16>}};

}  // namespace memsave_ext::loss_head::cpu::MEMSAVE_EXT_ISA
