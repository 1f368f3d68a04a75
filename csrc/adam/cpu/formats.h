// How tensors of each format are read and written, for the instruction set whose target region
// this is included in.
//
// Of each, `size` says how much of a vector, from element i, and noise is that of these elements.
#pragma once

#include "adam/cpu/noise.h"

namespace memsave_ext::adam::cpu::MEMSAVE_EXT_ISA {

using vector::BFloat16;
using vector::Half;

// Hardware prefetching ends at each page, and five arrays leave it little to see of each.
MEMSAVE_EXT_INLINED inline void prefetch(const void* from) {
  constexpr int64_t bytes_ahead = 1024;
  __builtin_prefetch(static_cast<const char*>(from) + bytes_ahead);
}

template <typename Storage>
struct Nearest {
  using Vector = isa::Lanes<Storage>;
  static constexpr bool kRandom = false;

  Storage* values;

  MEMSAVE_EXT_INLINED explicit Nearest(void* at, void* = nullptr)
      : values(static_cast<Storage*>(at)) {}

  MEMSAVE_EXT_INLINED void prefetch_at(int64_t i) const { prefetch(values + i); }

  template <typename Size>
  MEMSAVE_EXT_INLINED Vector load(int64_t i, Size size) const {
    return isa::load(values + i, size);
  }

  template <typename Size>
  MEMSAVE_EXT_INLINED void store(int64_t i, Vector v, Size size, const uint16_t*) const {
    isa::store(values + i, v, size);
  }
};

struct Stochastic {
  using Vector = Floats;
  static constexpr bool kRandom = true;

  BFloat16* values;

  MEMSAVE_EXT_INLINED explicit Stochastic(void* at, void* = nullptr)
      : values(static_cast<BFloat16*>(at)) {}

  MEMSAVE_EXT_INLINED void prefetch_at(int64_t i) const { prefetch(values + i); }

  template <typename Size>
  MEMSAVE_EXT_INLINED Vector load(int64_t i, Size size) const {
    return isa::load(values + i, size);
  }

  // What is added cannot reach the sign: infinities have no bits below those that are kept.
  template <typename Size>
  MEMSAVE_EXT_INLINED void store(int64_t i, Vector v, Size size, const uint16_t* noise) const {
    const isa::Bits rounded = ((isa::Bits)v + random_bits(noise)) >> 16;
    isa::store_halves(values + i, v != v ? isa::Bits{} + 0x7fc0u : rounded, size);
  }
};

struct Kahan {
  using Vector = Floats;
  static constexpr bool kRandom = false;

  BFloat16* values;
  BFloat16* rests;

  MEMSAVE_EXT_INLINED explicit Kahan(void* at, void* rest)
      : values(static_cast<BFloat16*>(at)), rests(static_cast<BFloat16*>(rest)) {}

  MEMSAVE_EXT_INLINED void prefetch_at(int64_t i) const {
    prefetch(values + i);
    prefetch(rests + i);
  }

  template <typename Size>
  MEMSAVE_EXT_INLINED Vector load(int64_t i, Size size) const {
    return isa::load(values + i, size) + isa::load(rests + i, size);
  }

  // An infinity has no rest: with one it would be no number when it is read again.
  template <typename Size>
  MEMSAVE_EXT_INLINED void store(int64_t i, Vector v, Size size, const uint16_t*) const {
    const isa::Bits bits = isa::bfloat16_bits(v);
    const Vector rest = v - (Vector)(bits << 16);
    isa::store_halves(values + i, bits, size);
    isa::store(rests + i, rest - rest == Vector{} ? rest : Vector{}, size);
  }
};

struct Split {
  using Vector = Floats;
  static constexpr bool kRandom = false;

  BFloat16* values;
  BFloat16* rests;  // integers

  MEMSAVE_EXT_INLINED explicit Split(void* at, void* rest)
      : values(static_cast<BFloat16*>(at)), rests(static_cast<BFloat16*>(rest)) {}

  MEMSAVE_EXT_INLINED void prefetch_at(int64_t i) const {
    prefetch(values + i);
    prefetch(rests + i);
  }

  template <typename Size>
  MEMSAVE_EXT_INLINED Vector load(int64_t i, Size size) const {
    using Integers = isa::Vector<int32_t, isa::kLanes<float>>;
    const auto rest = (isa::Bits)((Integers)isa::load(rests + i, size) >> 16);
    return (Vector)((isa::Bits)isa::load(values + i, size) + rest);
  }

  template <typename Size>
  MEMSAVE_EXT_INLINED void store(int64_t i, Vector v, Size size, const uint16_t*) const {
    const isa::Bits bits = v != v ? isa::Bits{} + 0x7fc00000u : (isa::Bits)v;
    isa::store_halves(values + i, (bits + 0x8000u) >> 16, size);
    isa::store_halves(rests + i, bits & 0xffffu, size);
  }
};

}  // namespace memsave_ext::adam::cpu::MEMSAVE_EXT_ISA
