// States of a part of a tensor whose elements are stored each by itself, for the instruction set
// whose target region this is included in. A step over vectors opens a chunk, loads and stores its
// vectors, and closes it. Blockwise states: blocks.h.
#pragma once

#include "adam/cpu/formats.h"

namespace memsave_ext::adam::cpu::MEMSAVE_EXT_ISA {

// State: Nearest or Short of cpu/formats.h.
template <typename State, int moments>
struct Separate {
  using V = typename State::Vector;
  static constexpr bool kClamps = false;
  static constexpr bool kInBlocks = false;
  static constexpr bool kRandom = State::kRandom;

  State exp_avg, exp_avg_sq, max_exp_avg_sq;

  MEMSAVE_EXT_INLINED explicit Separate(const Item& item)
      : exp_avg(item.exp_avg), exp_avg_sq(item.exp_avg_sq), max_exp_avg_sq(item.max_exp_avg_sq) {}

  MEMSAVE_EXT_INLINED void prefetch_at(int64_t i) const {
    if constexpr (moments > 0) exp_avg.prefetch_at(i);
    if constexpr (moments > 1) exp_avg_sq.prefetch_at(i);
    if constexpr (moments > 2) max_exp_avg_sq.prefetch_at(i);
  }

  MEMSAVE_EXT_INLINED void open(int64_t, int64_t) {}

  // The third argument is the offset of element i in the chunk.
  template <typename Size>
  MEMSAVE_EXT_INLINED void load(Values<V>& x, int64_t i, int64_t, Size size) const {
    if constexpr (moments > 0) x.exp_avg = exp_avg.load(i, size);
    if constexpr (moments > 1) x.exp_avg_sq = exp_avg_sq.load(i, size);
    if constexpr (moments > 2) x.max_exp_avg_sq = max_exp_avg_sq.load(i, size);
  }

  // noise: the chunk's random bits for moments.
  template <typename Size>
  MEMSAVE_EXT_INLINED void store(const Values<V>& x, int64_t i, int64_t offset, Size size,
                                 const Noise& noise) {
    [[maybe_unused]] const uint16_t* const random = noise.of + offset;
    if constexpr (moments > 0) exp_avg.store(i, x.exp_avg, size, random);
    if constexpr (moments > 1) exp_avg_sq.store(i, x.exp_avg_sq, size, random);
    if constexpr (moments > 2) max_exp_avg_sq.store(i, x.max_exp_avg_sq, size, random);
  }

  template <typename F>
  MEMSAVE_EXT_INLINED void close(int64_t, int64_t, const Noise&, const F&) {}
};

}  // namespace memsave_ext::adam::cpu::MEMSAVE_EXT_ISA
