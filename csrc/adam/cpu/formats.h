// How tensors of each format are read and written, for the instruction set whose target region
// this is included in.
//
// load() and store() take the first element, i, and `size`, how much of a vector to take. `noise`
// points to the random bits of these elements.
#pragma once

#include "adam/cpu/noise.h"
#include "vector/cpu.h"

namespace memsave_ext::adam::cpu::MEMSAVE_EXT_ISA {

using vector::BFloat16;
using vector::Half;

// Hardware prefetching stops at each page, which matters to small tensors. Further ahead costs: of
// 0 to 4096 bytes, 256 was never behind none, and from memory took 10 % less time than 1024.
MEMSAVE_EXT_INLINED inline void prefetch(const void* from) {
  constexpr int64_t bytes_ahead = 256;
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

// Low parts are read into the uppermost bits of words, and written from the lowest.
template <typename Size>
MEMSAVE_EXT_INLINED inline isa::Bits load_low(const uint8_t* from, Size size) {
  return isa::load_bytes(from, size) << 24;
}

template <typename Size>
MEMSAVE_EXT_INLINED inline isa::Bits load_low(const BFloat16* from, Size size) {
  return (isa::Bits)isa::load(from, size);
}

template <typename Size>
MEMSAVE_EXT_INLINED inline void store_low(uint8_t* to, isa::Bits bits, Size size) {
  isa::store_bytes(to, bits, size);
}

template <typename Size>
MEMSAVE_EXT_INLINED inline void store_low(BFloat16* to, isa::Bits bits, Size size) {
  isa::store_halves(to, bits, size);
}

// 16-bit values, each with a low part unless that is kNone. Bits: ParamBits or StateBits.
template <typename Bits, bool random, Element low_part>
struct Short {
  using Vector = Floats;
  using LowPart = std::conditional_t<low_part == Element::kInt8, uint8_t, BFloat16>;
  static constexpr bool kRandom = random;
  static constexpr bool kHasLowPart = low_part != Element::kNone;

  BFloat16* values;
  LowPart* low_parts;  // those of 16 bits are read as bfloat16, whatever they are

  MEMSAVE_EXT_INLINED explicit Short(void* at, void* low_parts = nullptr)
      : values(static_cast<BFloat16*>(at)), low_parts(static_cast<LowPart*>(low_parts)) {}

  MEMSAVE_EXT_INLINED void prefetch_at(int64_t i) const {
    prefetch(values + i);
    if constexpr (kHasLowPart) prefetch(low_parts + i);
  }

  template <typename Size>
  MEMSAVE_EXT_INLINED Vector load(int64_t i, Size size) const {
    isa::Bits low{};
    if constexpr (kHasLowPart) low = load_low(low_parts + i, size);
    return Bits::template load<Math>((isa::Bits)isa::load(values + i, size), low);
  }

  template <typename Size>
  MEMSAVE_EXT_INLINED void store(int64_t i, Vector v, Size size, const uint16_t* noise) const {
    isa::Bits drawn{};
    if constexpr (kRandom) drawn = random_bits(noise);
    const auto halves = Bits::template store<Math>(v, drawn);
    isa::store_halves(values + i, halves.param, size);
    if constexpr (kHasLowPart) store_low(low_parts + i, halves.low_part, size);
  }
};

template <ParamFormat format, typename Storage>
using Param =
    std::conditional_t<format == ParamFormat::kPlain, Nearest<Storage>,
                       Short<ParamBits<format>, row(format).at_random, row(format).low_part>>;

// States of a part of a tensor whose elements are stored each by itself. A step over vectors opens
// a chunk, loads and stores its vectors, and closes it. Blockwise states: blocks.h. State: Nearest
// or Short.
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
    [[maybe_unused]] const uint16_t* const random = noise.bits + offset;
    if constexpr (moments > 0) exp_avg.store(i, x.exp_avg, size, random);
    if constexpr (moments > 1) exp_avg_sq.store(i, x.exp_avg_sq, size, random);
    if constexpr (moments > 2) max_exp_avg_sq.store(i, x.max_exp_avg_sq, size, random);
  }

  template <typename F>
  MEMSAVE_EXT_INLINED void close(int64_t, int64_t, const Noise&, const F&) {}
};

}  // namespace memsave_ext::adam::cpu::MEMSAVE_EXT_ISA
