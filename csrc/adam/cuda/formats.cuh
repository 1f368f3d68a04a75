// Parameters and states in registers: read as values, and rounded as formats.h says, word by word.
#pragma once

#include "adam/cuda/arithmetic.cuh"
#include "vector/cuda.cuh"

namespace memsave_ext::adam {

using vector::Part;
using vector::ValueOf;

// A combination of formats. State has no meaning for blockwise states.
template <typename ParamType, ParamFormat format, StateFormat states, Rule rule>
struct Mode {
  using Param = ParamType;
  using Value = ValueOf<Param>;
  using State = std::conditional_t<states == StateFormat::kAsParam, Param,
                                   std::conditional_t<row(states).at_random, __nv_bfloat16, float>>;
  static constexpr StateFormat kStates = states;
  static constexpr ParamFormat kFormat = format;
  static constexpr Rule kRule = rule;
  static constexpr int kMoments = row(rule).moments;
  static constexpr Element kLowPart = row(format).low_part;
  static constexpr bool kHasLowPart = kLowPart != Element::kNone;
  static constexpr bool kRandomParam = row(format).at_random;
  static constexpr bool kRandomStates = row(states).at_random;
  // Elements that a thread takes at once: 16 bytes of a state; with random bits, the 8 of one draw.
  static constexpr int kSize =
      kRandomParam || kRandomStates || in_blocks(states) ? 8 : 16 / static_cast<int>(sizeof(State));
  // Blocks of threads that a multiprocessor must have room for; 0: any number. Draws side by side
  // would take more than 64 registers.
  static constexpr int kMinBlocks =
      kMoments > 2 && kRandomStates && (kRandomParam || sizeof(Param) == 4) ? 3
      : rule == Rule::kLion && sizeof(Param) == 8                           ? 5
                                                                            : 0;
  // Elements in a word: 2 of 16 bits, so that a word has at least 4 bytes, else 1.
  template <int size>
  static constexpr int kWord = size > 1 && (sizeof(Param) == 2 || sizeof(State) == 2) ? 2 : 1;
};

// A vector whose words are updated in place, one after the other, because all new values would not
// fit into registers beside the old ones.
template <typename T, int size, int word>
struct alignas(sizeof(T) * size < 16 ? sizeof(T) * size : 16) Words {
  using Element = T;
  using Word = vector::Vector<T, word>;
  Word words[size / word];
};

// 16 random bits for each of `size` elements, 1 or the 8 of one draw. Two share a word, the first
// in its lower half.
template <int size>
struct Bits {
  static constexpr int kWords = size == 1 ? 1 : size / 2;
  uint32_t words[kWords];

  // Returns the bits of element i, in the lower half.
  __device__ __forceinline__ uint32_t of(int i) const {
    return size == 1 ? words[0] : words[i / 2] >> (16 * (i % 2)) & 0xffff;
  }

  // i: the index of the vector of `size` elements.
  static __device__ __forceinline__ Bits draw(const Random& random, Draw what, int64_t i) {
    if constexpr (size == 1) {
      return {{random.element(what, i)}};
    } else {
      static_assert(size == 8);
      const Words4<uint32_t> drawn = random.group(what, i);
      return {{drawn.word[0], drawn.word[1], drawn.word[2], drawn.word[3]}};
    }
  }
};

// A word of one or two bfloat16.
template <int word>
using Word16 = vector::Vector<__nv_bfloat16, word>;

// Returns the word whose elements are the lower halves of `bits`.
template <int word>
__device__ __forceinline__ Word16<word> lower_halves(const uint32_t (&bits)[word]) {
  if constexpr (word == 1) {
    return {{__ushort_as_bfloat16(static_cast<uint16_t>(bits[0]))}};
  } else {
    return {{__byte_perm(bits[0], bits[1], 0x5410)}};
  }
}

// Returns the bits of element i, in the upper half.
template <int word>
__device__ __forceinline__ uint32_t bits_of(const Word16<word>& values, int i) {
  if constexpr (word == 1) {
    return static_cast<uint32_t>(__bfloat16_as_ushort(values.values[0])) << 16;
  } else {
    return i == 0 ? values.words[0] << 16 : values.words[0] & 0xffff0000u;
  }
}

// Bytes, in words of 4 where there are as many.
template <int size>
struct alignas(size) Bytes {
  using Element = uint8_t;
  uint32_t words[size / 4];

  __device__ __forceinline__ uint32_t operator[](int i) const {
    return words[i / 4] >> (8 * (i % 4)) & 0xff;
  }

  __device__ __forceinline__ void set(int i, uint32_t byte) {
    const int shift = 8 * (i % 4);
    words[i / 4] = (words[i / 4] & ~(0xffu << shift)) | byte << shift;
  }
};

template <>
struct Bytes<1> {
  using Element = uint8_t;
  uint8_t byte;

  __device__ __forceinline__ uint32_t operator[](int) const { return byte; }
  __device__ __forceinline__ void set(int, uint32_t to) { byte = static_cast<uint8_t>(to); }
};

// The low parts of a vector of parameters, in as many bits as they have. get() returns one in the
// uppermost bits, set() takes those of a word in the lowest.
template <int size, int word, Element element>
struct LowParts : Words<__nv_bfloat16, size, word> {
  __device__ __forceinline__ uint32_t get(int w, int i) const {
    return bits_of<word>(this->words[w], i);
  }
  __device__ __forceinline__ void set(int w, const uint32_t (&bits)[word]) {
    this->words[w] = lower_halves<word>(bits);
  }
};

template <int size, int word>
struct LowParts<size, word, Element::kInt8> : Bytes<size> {
  __device__ __forceinline__ uint32_t get(int w, int i) const {
    return (*this)[w * word + i] << 24;
  }
  __device__ __forceinline__ void set(int w, const uint32_t (&bits)[word]) {
#pragma unroll
    for (int i = 0; i < word; ++i) Bytes<size>::set(w * word + i, bits[i]);
  }
};

template <typename M, int size>
struct Params {
  using Value = typename M::Value;
  static constexpr int kWord = M::template kWord<size>;
  using Stored = Words<typename M::Param, size, kWord>;
  using LowPart = LowParts<size, kWord, M::kLowPart>;
  using Word = typename Stored::Word;
  Stored stored;
  LowPart low_part;

  __device__ __forceinline__ Value get(int w, int i) const {
    if constexpr (M::kFormat == ParamFormat::kPlain) {
      return stored.words[w][i];
    } else {
      uint32_t of_low_part = 0;
      if constexpr (M::kHasLowPart) of_low_part = low_part.get(w, i);
      return ParamBits<M::kFormat>::template load<Math>(bits_of<kWord>(stored.words[w], i),
                                                        of_low_part);
    }
  }

  // random: 16 bits for each of the word's elements, where the format takes any.
  __device__ __forceinline__ void set(int w, const Value (&values)[kWord], uint32_t random) {
    if constexpr (M::kFormat == ParamFormat::kPlain) {
      stored.words[w] = Word::from(values);
    } else {
      uint32_t params[kWord], low_parts[kWord];
#pragma unroll
      for (int i = 0; i < kWord; ++i) {
        const uint32_t drawn = i == 0 ? random & 0xffff : random >> 16;
        const auto halves = ParamBits<M::kFormat>::template store<Math>(values[i], drawn);
        params[i] = halves.param;
        low_parts[i] = halves.low_part;
      }
      stored.words[w] = lower_halves<kWord>(params);
      if constexpr (M::kHasLowPart) low_part.set(w, low_parts);
    }
  }
};

template <typename M, int size>
struct States {
  using Value = typename M::Value;
  static constexpr int kWord = M::template kWord<size>;
  using Stored = Words<typename M::State, size, kWord>;
  Stored stored;

  __device__ __forceinline__ Value get(int w, int i) const {
    if constexpr (M::kRandomStates) {
      return StateBits<M::kStates>::template load<Math>(bits_of<kWord>(stored.words[w], i),
                                                        uint32_t{0});
    } else {
      return stored.words[w][i];
    }
  }

  __device__ __forceinline__ void set(int w, const Value (&values)[kWord], uint32_t random) {
    if constexpr (M::kRandomStates) {
      uint32_t bits[kWord];
#pragma unroll
      for (int i = 0; i < kWord; ++i) {
        const uint32_t drawn = i == 0 ? random & 0xffff : random >> 16;
        bits[i] = StateBits<M::kStates>::template store<Math>(values[i], drawn).param;
      }
      stored.words[w] = lower_halves<kWord>(bits);
    } else {
      stored.words[w] = Stored::Word::from(values);
    }
  }
};

// Returns whether all pointers are aligned for such vectors.
template <typename Vec, typename... Pointers>
__device__ __forceinline__ bool is_aligned_for(Pointers... pointers) {
  return ((reinterpret_cast<uintptr_t>(pointers) | ...) & (alignof(Vec) - 1)) == 0;
}

// The same for vectors of `size` elements, which are loaded in parts of at most 16 bytes.
template <typename T, int size, typename... Pointers>
__device__ __forceinline__ bool is_aligned(Pointers... pointers) {
  return is_aligned_for<Words<T, size, 1>>(pointers...);
}

// Returns whether the parameter, its low part and its gradient are.
template <typename M, int size>
__device__ __forceinline__ bool params_are_aligned(const BatchedTensor& tensor) {
  return is_aligned<typename M::Param, size>(tensor.param, tensor.grad) &&
         is_aligned_for<typename Params<M, size>::LowPart>(tensor.param_low_part);
}

}  // namespace memsave_ext::adam
