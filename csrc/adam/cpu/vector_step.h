// The step over vectors, for the instruction set whose target region this is included in.
//
// Every element goes through the same vector code, tails too, so that its result does not depend on
// its place.
#pragma once

#include "adam/cpu/blocks.h"
#include "adam/cpu/loops.h"
#include "adam/cpu/states.h"

namespace memsave_ext::adam::cpu::MEMSAVE_EXT_ISA {

template <typename V>
struct Broadcast {
  MEMSAVE_EXT_INLINED V operator()(double value) const {
    return isa::broadcast<V>(static_cast<std::remove_reference_t<decltype(V{}[0])>>(value));
  }
};

// Stands in for a gradient that is null.
template <typename Grad>
alignas(64) constexpr Grad kZeros[kBlock] = {};

// Param: Nearest or Short of cpu/formats.h. closes: the phase is kClose, else kWhole. The compiler
// knows it, because the time for memory does not hide branches in the loop.
template <typename Param, typename States, Rule rule, bool closes>
__attribute__((flatten)) void step(const Item& item, int64_t begin, int64_t end,
                                   const Coefficients<double>& scalars) {
  using V = typename Param::Vector;
  static_assert(std::is_same_v<V, typename States::V>);
  using Value = std::remove_reference_t<decltype(V{}[0])>;
  using Grad = std::remove_pointer_t<decltype(Param::values)>;
  constexpr int64_t lanes = sizeof(V) / sizeof(Value);
  constexpr bool in_chunks = States::kInBlocks || Param::kRandom || States::kRandom;
  auto c = convert<V>(scalars, Broadcast<V>{});
  c.phase = closes ? StepPhase::kClose : StepPhase::kWhole;
  const Param param(item.param, item.param_low_part);
  States states(item);
  Noise of_param, of_moments;
  // grad: the chunk's gradient. offset: of element i in the chunk.
  const auto update_at = [&](const Grad* grad, int64_t i, int64_t offset,
                             auto size) MEMSAVE_EXT_INLINED {
    Values<V> x;
    x.param = param.load(i, size);
    states.load(x, i, offset, size);
    update<Math, rule, States::kClamps>(c, isa::load(grad + offset, size), x);
    param.store(i, x.param, size, of_param.of + offset);
    states.store(x, i, offset, size, of_moments);
  };
  const auto update_chunk = [&](const Grad* grad, int64_t from, int64_t to) MEMSAVE_EXT_INLINED {
    int64_t i = from;
    for (; i + lanes <= to; i += lanes) {
      param.prefetch_at(i);
      prefetch(grad + (i - from));
      states.prefetch_at(i);
      update_at(grad, i, i - from, isa::Whole{});
    }
    if (i < to) update_at(grad, i, i - from, isa::Part{to - i});
  };

  const auto* const grad = static_cast<const Grad*>(item.grad);
  const int64_t chunk = in_chunks || grad == nullptr ? kBlock : end - begin;
  for (int64_t from = begin; from < end; from += chunk) {
    const int64_t to = end - from < chunk ? end : from + chunk;
    if constexpr (Param::kRandom) draw(item, Draw::kParam, from, to, of_param);
    if constexpr (States::kRandom) draw(item, Draw::kMoments, from, to, of_moments);
    states.open(from, to);
    update_chunk(grad != nullptr ? grad + from : kZeros<Grad>, from, to);
    states.close(from, to, of_moments);
  }
}

// Folds micro-gradients into the moments, whose type is the one that gradients are computed in.
template <typename Grad>
__attribute__((flatten)) void fold_grads(const Item& item, int64_t begin, int64_t end,
                                         const Coefficients<double>& scalars) {
  using V = isa::Lanes<Grad>;
  using State = Nearest<vector::ValueOf<Grad>>;
  constexpr int64_t lanes = isa::kLanes<Grad>;
  const auto c = convert<V>(scalars, Broadcast<V>{});
  const bool first = c.phase == StepPhase::kFirstFold;
  constexpr bool random = std::is_same_v<V, Floats>;  // packing rounds exp_avg_sq at random
  const auto* const grad = static_cast<const Grad*>(item.grad);
  const State exp_avg(item.exp_avg), exp_avg_sq(item.exp_avg_sq);
  Noise noise;

  const auto fold_at = [&](int64_t i, int64_t offset, auto size) MEMSAVE_EXT_INLINED {
    Values<V> x{};
    x.exp_avg = exp_avg.load(i, size);
    if (first) x.exp_avg_sq = exp_avg_sq.load(i, size);
    const V micro_grad = grad == nullptr ? V{} : isa::load(grad + i, size);
    isa::Bits bits{};
    if constexpr (random) {
      if (first) bits = random_bits(noise.of + offset);
    }
    fold<Math>(c, micro_grad, x, bits);
    exp_avg.store(i, x.exp_avg, size, nullptr);
    if (first) exp_avg_sq.store(i, x.exp_avg_sq, size, nullptr);
  };
  for (int64_t from = begin; from < end; from += kBlock) {
    const int64_t to = end - from < kBlock ? end : from + kBlock;
    if (first && random) draw(item, Draw::kMoments, from, to, noise);
    int64_t i = from;
    for (; i + lanes <= to; i += lanes) {
      prefetch(grad + i);
      exp_avg.prefetch_at(i);
      if (first) exp_avg_sq.prefetch_at(i);
      fold_at(i, i - from, isa::Whole{});
    }
    if (i < to) fold_at(i, i - from, isa::Part{to - i});
  }
}

struct StepSource {
  static constexpr bool makes(const Combination&) { return true; }

  template <int index>
  static constexpr Step kernel() {
    constexpr Combination c = Combination::at(index);
    using Storage = vector::StorageOf<c.param>;
    return step<Param<c.format, Storage>, States<c.states, Storage, row(c.rule).moments>, c.rule,
                c.closes>;
  }
};

struct FoldSource {
  template <DType dtype>
  static constexpr Step kernel() {
    return fold_grads<vector::StorageOf<dtype>>;
  }
};

}  // namespace memsave_ext::adam::cpu::MEMSAVE_EXT_ISA
