// How tensors of each format are read and written, for the instruction set whose target region
// this is included in.
//
// load() and store() take the first element, i, and `size`, how much of a vector to take. `noise`
// points to the random bits of these elements.
#pragma once

#include "adam/cpu/noise.h"

namespace memsave_ext::adam::cpu::MEMSAVE_EXT_ISA {

using vector::BFloat16;
using vector::Half;

// Hardware prefetching stops at each page, and with five arrays sees too little of each.
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

// 16-bit values, and with `has_rest` a 16-bit rest of each. Bits: ParamBits or StateBits.
template <typename Bits, bool random, bool has_rest>
struct Short {
  using Vector = Floats;
  static constexpr bool kRandom = random;
  static constexpr bool kHasRest = has_rest;

  BFloat16* values;
  BFloat16* rests;  // int16 with kSplit

  MEMSAVE_EXT_INLINED explicit Short(void* at, void* rest = nullptr)
      : values(static_cast<BFloat16*>(at)), rests(static_cast<BFloat16*>(rest)) {}

  MEMSAVE_EXT_INLINED void prefetch_at(int64_t i) const {
    prefetch(values + i);
    if constexpr (kHasRest) prefetch(rests + i);
  }

  template <typename Size>
  MEMSAVE_EXT_INLINED Vector load(int64_t i, Size size) const {
    isa::Bits rest{};
    if constexpr (kHasRest) rest = (isa::Bits)isa::load(rests + i, size);
    return Bits::template load<Math>((isa::Bits)isa::load(values + i, size), rest);
  }

  template <typename Size>
  MEMSAVE_EXT_INLINED void store(int64_t i, Vector v, Size size, const uint16_t* noise) const {
    isa::Bits drawn{};
    if constexpr (kRandom) drawn = random_bits(noise);
    const auto halves = Bits::template store<Math>(v, drawn);
    isa::store_halves(values + i, halves.param, size);
    if constexpr (kHasRest) isa::store_halves(rests + i, halves.rest, size);
  }
};

template <ParamFormat format, typename Storage>
using Param = std::conditional_t<
    format == ParamFormat::kPlain, Nearest<Storage>,
    Short<ParamBits<format>, row(format).at_random, row(format).rest != Element::kNone>>;

}  // namespace memsave_ext::adam::cpu::MEMSAVE_EXT_ISA
