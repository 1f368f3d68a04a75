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

// 16-bit values, and with `has_low_part` a 16-bit low part of each. Bits: ParamBits or StateBits.
template <typename Bits, bool random, bool has_low_part>
struct Short {
  using Vector = Floats;
  static constexpr bool kRandom = random;
  static constexpr bool kHasLowPart = has_low_part;

  BFloat16* values;
  BFloat16* low_parts;  // int16 with kSplit

  MEMSAVE_EXT_INLINED explicit Short(void* at, void* low_part = nullptr)
      : values(static_cast<BFloat16*>(at)), low_parts(static_cast<BFloat16*>(low_part)) {}

  MEMSAVE_EXT_INLINED void prefetch_at(int64_t i) const {
    prefetch(values + i);
    if constexpr (kHasLowPart) prefetch(low_parts + i);
  }

  template <typename Size>
  MEMSAVE_EXT_INLINED Vector load(int64_t i, Size size) const {
    isa::Bits low_part{};
    if constexpr (kHasLowPart) low_part = (isa::Bits)isa::load(low_parts + i, size);
    return Bits::template load<Math>((isa::Bits)isa::load(values + i, size), low_part);
  }

  template <typename Size>
  MEMSAVE_EXT_INLINED void store(int64_t i, Vector v, Size size, const uint16_t* noise) const {
    isa::Bits drawn{};
    if constexpr (kRandom) drawn = random_bits(noise);
    const auto halves = Bits::template store<Math>(v, drawn);
    isa::store_halves(values + i, halves.param, size);
    if constexpr (kHasLowPart) isa::store_halves(low_parts + i, halves.low_part, size);
  }
};

template <ParamFormat format, typename Storage>
using Param = std::conditional_t<
    format == ParamFormat::kPlain, Nearest<Storage>,
    Short<ParamBits<format>, row(format).at_random, row(format).low_part != Element::kNone>>;

}  // namespace memsave_ext::adam::cpu::MEMSAVE_EXT_ISA
