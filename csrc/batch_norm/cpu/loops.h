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

// Calls body(first row, distance, group) for all rows: in groups of kUnroll rows that lie
// `distance` apart, and then one by one. Processors follow several streams of addresses better than
// one, which ends with each page.
template <typename Body>
MEMSAVE_EXT_INLINED inline void for_groups(int64_t rows, const Body& body) {
  const int64_t distance = rows / kUnroll;
  int64_t row = 0;
  while (row < rows) {  // one call, so that it is compiled once
    const int group = row < distance ? kUnroll : 1;
    body(row, distance, group);
    row = row + 1 == distance ? kUnroll * distance : row + 1;
  }
}

// Whether a row's last vector ends with the row, and overlaps the one before: where a part of a
// vector takes longer than a whole one.
constexpr bool kOverlaps = MEMSAVE_EXT_VECTOR_BYTES < 64;

// Calls body(column, size, k) for the vectors that make up the values from `begin` to `end`. `k`,
// from 0 to unroll - 1, differs between neighbouring whole vectors. The last one is a Part, or the
// Last of a whole vector if values from `lowest` on may be taken again.
template <typename Storage, int unroll, typename Body>
MEMSAVE_EXT_INLINED inline void for_vectors(int64_t begin, int64_t end, int64_t lowest,
                                            const Body& body) {
  constexpr int64_t lanes = kLanes<Storage>;
  int64_t column = begin;
  for (; column + unroll * lanes <= end; column += unroll * lanes) {
    for (int k = 0; k < unroll; ++k) body(column + k * lanes, Whole{}, k);
  }
  for (int k = 0; k < unroll - 1 && column + lanes <= end; ++k, column += lanes) {
    body(column, Whole{}, k);
  }
  if (column >= end) return;
  if (kOverlaps && end - lanes >= lowest) {
    body(end - lanes, Last{end - column}, unroll - 1);
  } else {
    body(column, Part{(end - column) & (lanes - 1)}, unroll - 1);
  }
}

// Whether outputs may bypass the caches: not with the small vectors of CPUs of before 2013.
constexpr bool kStreams = MEMSAVE_EXT_VECTOR_BYTES >= 32;

// The values, and the vectors, of a cache line; of one vector where nothing is streamed.
template <typename Storage>
constexpr int kLineValues = kStreams ? 64 / sizeof(Storage) : kLanes<Storage>;
template <typename Storage>
constexpr int kLineVectors = kLineValues<Storage> / kLanes<Storage>;

template <int vectors>
struct Vectors {
  static constexpr int kCount = vectors;
};

// Calls body(column, size, Vectors) for the vectors that make up `width` values. The first `head`
// and the last ones come one by one, those between them a cache line at a time.
template <typename Storage, typename Size, typename Body>
MEMSAVE_EXT_INLINED inline void for_lines(int64_t head, int64_t width, Size size,
                                          const Body& body) {
  const auto one = [&](int64_t column, auto of_one, int)
                       MEMSAVE_EXT_INLINED { body(column, of_one, Vectors<1>{}); };
  for_vectors<Storage, 1>(0, head, 0, one);
  int64_t column = head;
  for (; column + kLineValues<Storage> <= width; column += kLineValues<Storage>) {
    body(column, size, Vectors<kLineVectors<Storage>>{});
  }
  // What was streamed is not to be touched again.
  for_vectors<Storage, 1>(column, width, std::is_same_v<Size, Streamed> ? column : 0, one);
}

// The coefficients of one channel; with `channels_last`, of a vector of channels from that one on.
// All are loaded in the constructor, because for all the compiler knows a later store could change
// them.
template <typename Storage, bool channels_last>
struct Coefficients {
  using V = Lanes<Storage>;

  Coefficients() = default;
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
      for_groups(piece.rows, [&](int64_t row, int64_t distance, int group) MEMSAVE_EXT_INLINED {
        for_vectors<Storage, 1>(
            0, piece.width, piece.width, [&](int64_t column, auto size, int) MEMSAVE_EXT_INLINED {
              const Of of(piece, column);
              V* sums = values_[column / kLanes<Storage>];
              V first = sums[0], second = sums[1];
              for (int k = 0; k < group; ++k) {
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
        for_vectors<Storage, kUnroll>(0, piece.width, 0,
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

// The coefficients of neighbouring vectors: of each one with channels last, else of the channel.
template <typename Storage, int count>
struct OfEach {
  MEMSAVE_EXT_INLINED OfEach(const Piece& piece, int64_t channel) {
    for (int v = 0; v < count; ++v) of[v] = {piece, channel + v * kLanes<Storage>};
  }
  MEMSAVE_EXT_INLINED const auto& operator[](int v) const { return of[v]; }

  Coefficients<Storage, true> of[count];
};

template <typename Storage>
struct OfAll {
  MEMSAVE_EXT_INLINED const auto& operator[](int) const { return of; }

  const Coefficients<Storage, false>& of;
};

// Calls body(place, size, coefficients, Vectors) for all vectors of a piece. The body writes at
// `to` + place, which decides where streaming starts. What is streamed is written a cache line at a
// time: a processor gathers few lines at once, and one that leaves half full costs many times more.
template <typename Storage, bool channels_last, typename Body>
MEMSAVE_EXT_INLINED inline void for_written(const Piece& piece, const void* to, const Body& body) {
  // Returns how many values come before the first line.
  const auto offset = static_cast<int64_t>(reinterpret_cast<uintptr_t>(to) / sizeof(Storage));
  const auto head = [&](int64_t place, auto whole) {
    if constexpr (std::is_same_v<decltype(whole), Whole>) return int64_t{0};
    const int64_t left = -(offset + place) & (kLineValues<Storage> - 1);
    return left < piece.width ? left : piece.width;
  };
  const auto rows = [&](auto whole) MEMSAVE_EXT_INLINED {
    for_groups(piece.rows, [&](int64_t row, int64_t distance, int group) MEMSAVE_EXT_INLINED {
      const int64_t first = row * piece.stride, next = distance * piece.stride;
      for_lines<Storage>(head(first, whole), piece.width, whole,
                         [&](int64_t column, auto size, auto vectors) MEMSAVE_EXT_INLINED {
                           const OfEach<Storage, decltype(vectors)::kCount> of(piece, column);
                           for (int k = 0; k < group; ++k) {
                             body(first + k * next + column, size, of, vectors);
                           }
                         });
    });
  };
  // Loads the coefficients of the next run early: a load can wait long behind streaming stores.
  const auto runs = [&](auto whole) MEMSAVE_EXT_INLINED {
    Coefficients<Storage, false> early(piece, 0);
    for_groups(piece.rows, [&](int64_t row, int64_t distance, int group) MEMSAVE_EXT_INLINED {
      for (int64_t channel = 0; channel < piece.channels; ++channel) {
        const Coefficients<Storage, false> of = early;
        early = Coefficients<Storage, false>(piece, channel + 1 < piece.channels ? channel + 1 : 0);
        const int64_t first = row * piece.stride + channel * piece.channel_stride;
        const int64_t next = distance * piece.stride;
        for_lines<Storage>(head(first, whole), piece.width, whole,
                           [&](int64_t column, auto size, auto vectors) MEMSAVE_EXT_INLINED {
                             for (int k = 0; k < group; ++k) {
                               body(first + k * next + column, size, OfAll<Storage>{of}, vectors);
                             }
                           });
      }
    });
  };
  const auto all = [&](auto whole) MEMSAVE_EXT_INLINED {
    if constexpr (channels_last) {
      rows(whole);
    } else {
      runs(whole);
    }
  };
  if constexpr (kStreams) {
    if (piece.stream) {
      all(Streamed{});
#if defined(__x86_64__)
      _mm_sfence();
#endif
      return;
    }
  }
  all(Whole{});
}

}  // namespace memsave_ext::batch_norm::cpu::MEMSAVE_EXT_ISA
