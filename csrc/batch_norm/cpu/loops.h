// The loops over a piece: those that sum, and those that write.
//
// Included in the target region of an instruction set, like vector/cpu.h.
#include "batch_norm/cpu/piece.h"
#include "vector/cpu.h"

namespace memsave_ext::batch_norm::cpu::MEMSAVE_EXT_ISA {

using namespace vector::MEMSAVE_EXT_ISA;
using vector::BFloat16;
using vector::Half;
using vector::ValueOf;

// The independent sums of a run; with channels_last, the rows for which coefficients are loaded
// once.
constexpr int kUnroll = 4;

template <int rows>
struct Group {
  static constexpr int kRows = rows;
};

// Calls body(first row, distance, Group) for all rows: in groups of kUnroll rows that lie
// `distance` apart, and then one by one. Processors follow several streams of addresses better than
// one, which ends with each page.
template <typename Body>
MEMSAVE_EXT_INLINED inline void for_groups(int64_t rows, const Body& body) {
  const int64_t distance = rows / kUnroll;
  for (int64_t row = 0; row < distance; ++row) body(row, distance, Group<kUnroll>{});
  for (int64_t row = kUnroll * distance; row < rows; ++row) body(row, distance, Group<1>{});
}

// Calls body(column, size, k) for the vectors that make up `width` values. The first has `head`
// values, unless that is 0; the last may be partial, too. `k`, from 0 to unroll - 1, differs
// between neighbouring whole vectors.
template <typename Storage, int unroll, typename Size, typename Body>
MEMSAVE_EXT_INLINED inline void for_vectors(int64_t head, int64_t width, Size size,
                                            const Body& body) {
  constexpr int64_t lanes = kLanes<Storage>;
  if (head > 0) body(int64_t{0}, Part{head}, 0);
  int64_t column = head;
  for (; column + unroll * lanes <= width; column += unroll * lanes) {
    for (int k = 0; k < unroll; ++k) body(column + k * lanes, size, k);
  }
  for (int k = 0; k < unroll - 1 && column + lanes <= width; ++k, column += lanes) {
    body(column, size, k);
  }
  if (column < width) body(column, Part{(width - column) & (lanes - 1)}, unroll - 1);
}

// The coefficients of one channel; with `channels_last`, of a vector of channels from that one on.
// All are loaded in the constructor, because for all the compiler knows a later store could change
// them.
template <typename Storage, bool channels_last>
struct Coefficients {
  using V = Lanes<Storage>;

  MEMSAVE_EXT_INLINED Coefficients(const Piece& piece, int64_t channel) {
    const auto* from = static_cast<const ValueOf<Storage>*>(piece.coefficients) + channel;
    for (int c = 0; c < kCoefficients; ++c, from += piece.pitch) {
      values[c] = channels_last ? load_raw<V>(from) : broadcast<V>(*from);
    }
  }
  MEMSAVE_EXT_INLINED V operator[](Coefficient which) const { return values[which]; }

  V values[kCoefficients];
};

// Two sums for each channel of a piece. term(place, size, of, first, second) sets the two vectors
// to be added; `of` is an Of(piece, channel). Channels first, `by_channel` takes all rows of a
// channel before the next one, which adds up less; else the order is that of addresses.
template <typename Storage, typename Of, bool channels_last, bool by_channel>
class Sums {
 public:
  using V = Lanes<Storage>;

  template <typename Term>
  MEMSAVE_EXT_INLINED Sums(const Piece& piece, const Term& term) {
    if constexpr (channels_last) {
      for_groups(piece.rows, [&](int64_t row, int64_t distance, auto group) MEMSAVE_EXT_INLINED {
        for_vectors<Storage, 1>(
            0, piece.width, Whole{}, [&](int64_t column, auto size, int) MEMSAVE_EXT_INLINED {
              const Of of(piece, column);
              V* sums = values_[column / kLanes<Storage>];
              V first = sums[0], second = sums[1];
              for (int k = 0; k < decltype(group)::kRows; ++k) {
                V a, b;
                term((row + k * distance) * piece.stride + column, size, of, a, b);
                first += a;
                second += b;
              }
              sums[0] = first;
              sums[1] = second;
            });
      });
    } else {
      const auto add = [&](int64_t row, int64_t channel, const Of& of, V* first,
                           V* second) MEMSAVE_EXT_INLINED {
        const int64_t start = row * piece.stride + channel * piece.channel_stride;
        for_vectors<Storage, kUnroll>(0, piece.width, Whole{},
                                      [&](int64_t column, auto size, int k) MEMSAVE_EXT_INLINED {
                                        V a, b;
                                        term(start + column, size, of, a, b);
                                        first[k] += a;
                                        second[k] += b;
                                      });
      };
      const auto finish = [&](int64_t channel, const V* first,
                              const V* second) MEMSAVE_EXT_INLINED {
        values_[channel][0] += (first[0] + first[1]) + (first[2] + first[3]);
        values_[channel][1] += (second[0] + second[1]) + (second[2] + second[3]);
      };
      if constexpr (by_channel) {
        for (int64_t channel = 0; channel < piece.channels; ++channel) {
          const Of of(piece, channel);
          V first[kUnroll]{}, second[kUnroll]{};
          for (int64_t row = 0; row < piece.rows; ++row) add(row, channel, of, first, second);
          finish(channel, first, second);
        }
      } else {
        for (int64_t row = 0; row < piece.rows; ++row) {
          for (int64_t channel = 0; channel < piece.channels; ++channel) {
            const Of of(piece, channel);
            V first[kUnroll]{}, second[kUnroll]{};
            add(row, channel, of, first, second);
            finish(channel, first, second);
          }
        }
      }
    }
  }

  double get(int64_t channel, int which) const {
    constexpr int64_t lanes = kLanes<Storage>;
    if constexpr (channels_last) return values_[channel / lanes][which][channel % lanes];
    return total(values_[channel][which]);
  }

 private:
  V values_[channels_last ? kMaxChannelsLast / kLanes<Storage> : kMaxChannelsFirst][2] = {};
};

// Calls body(place, size, coefficients) for all vectors of a piece. The body writes at `to` +
// place, which decides where streaming starts.
template <typename Storage, bool channels_last, typename Body>
MEMSAVE_EXT_INLINED inline void for_written(const Piece& piece, const void* to, const Body& body) {
  constexpr auto lanes = kLanes<Storage>;
  // Returns how many values come before the first address that is aligned for streaming.
  const auto offset = static_cast<int64_t>(reinterpret_cast<uintptr_t>(to) / sizeof(Storage));
  const auto head = [&](int64_t place, auto whole) {
    if constexpr (std::is_same_v<decltype(whole), Whole>) return int64_t{0};
    const int64_t left = -(offset + place) & (lanes - 1);
    return left < piece.width ? left : piece.width;
  };
  const auto rows = [&](auto whole) MEMSAVE_EXT_INLINED {
    for_groups(piece.rows, [&](int64_t row, int64_t distance, auto group) MEMSAVE_EXT_INLINED {
      const int64_t first = row * piece.stride, next = distance * piece.stride;
      for_vectors<Storage, 1>(head(first, whole), piece.width, whole,
                              [&](int64_t column, auto size, int) MEMSAVE_EXT_INLINED {
                                const Coefficients<Storage, true> of(piece, column);
                                for (int k = 0; k < decltype(group)::kRows; ++k) {
                                  body(first + k * next + column, size, of);
                                }
                              });
    });
  };
  // Loads the coefficients of the next run early: a load can wait long behind streaming stores.
  const auto runs = [&](auto whole) MEMSAVE_EXT_INLINED {
    Coefficients<Storage, false> early(piece, 0);
    for_groups(piece.rows, [&](int64_t row, int64_t distance, auto group) MEMSAVE_EXT_INLINED {
      for (int64_t channel = 0; channel < piece.channels; ++channel) {
        const Coefficients<Storage, false> of = early;
        early = Coefficients<Storage, false>(piece, channel + 1 < piece.channels ? channel + 1 : 0);
        const int64_t first = row * piece.stride + channel * piece.channel_stride;
        const int64_t next = distance * piece.stride;
        for_vectors<Storage, 1>(head(first, whole), piece.width, whole,
                                [&](int64_t column, auto size, int) MEMSAVE_EXT_INLINED {
                                  for (int k = 0; k < decltype(group)::kRows; ++k) {
                                    body(first + k * next + column, size, of);
                                  }
                                });
      }
    });
  };
  if constexpr (channels_last) {
    piece.stream ? rows(Streamed{}) : rows(Whole{});
  } else {
    piece.stream ? runs(Streamed{}) : runs(Whole{});
  }
#if defined(__x86_64__)
  if (piece.stream) _mm_sfence();
#endif
}

}  // namespace memsave_ext::batch_norm::cpu::MEMSAVE_EXT_ISA
