// The loops over a piece, those that sum and those that write, and the passes that are made of
// them, for the instruction set in whose target region this file is included.
//
// All values go through the same vector code, those of partial vectors too, so that a result does
// not depend on a value's position: forward and recompute write the same bits.
#include "batch_norm/cpu/loops.h"
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
// and the last ones come one by one, those between them a cache line at a time. Values may be taken
// again where a whole vector ends with the row, but not those that were streamed.
template <typename Storage, typename Size, typename Body>
MEMSAVE_EXT_INLINED inline void for_lines(int64_t head, int64_t width, Size size,
                                          const Body& body) {
  constexpr int64_t lanes = kLanes<Storage>;
  int64_t column = 0, end = head;
  for (int side = 0; side < 2; ++side) {  // not a function called twice: it is compiled once
    const int64_t lowest = std::is_same_v<Size, Streamed> ? column : 0;
    const int64_t whole_until = kOverlaps && end - lanes >= lowest ? end : end - lanes + 1;
    for (; column < whole_until; column += lanes) {
      body(column + lanes <= end ? column : end - lanes, Whole{}, Vectors<1>{});
    }
    if (column < end) body(column, Part{(end - column) & (lanes - 1)}, Vectors<1>{});
    if (side > 0) break;
    for (column = head; column + kLineValues<Storage> <= width; column += kLineValues<Storage>) {
      body(column, size, Vectors<kLineVectors<Storage>>{});
    }
    end = width;
  }
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

// Two sums for each channel of a piece. term(place, size, coefficients, first, second) sets the two
// vectors to be added; `coefficients` is a PerChannel(piece, channel). Channels first, `by_channel`
// takes all rows of a channel before the next one, which adds up less; else the order is that of
// addresses.
template <typename Storage, typename PerChannel, bool channels_last, bool by_channel>
class Sums {
 public:
  using V = Lanes<Storage>;

  template <typename Term>
  MEMSAVE_EXT_INLINED Sums(const Piece& piece, const Term& term) {
    if constexpr (channels_last) {
      for_groups(piece.rows, [&](int64_t row, int64_t distance, int group) MEMSAVE_EXT_INLINED {
        for_vectors<Storage, 1>(
            0, piece.width, piece.width, [&](int64_t column, auto size, int) MEMSAVE_EXT_INLINED {
              const PerChannel coefficients(piece, column);
              V* sums = values_[column / kLanes<Storage>];
              V first = sums[0], second = sums[1];
              for (int k = 0; k < group; ++k) {
                V a, b;
                term((row + k * distance) * piece.stride + column, size, coefficients, a, b);
                first += a;
                second += b;
              }
              sums[0] = first;
              sums[1] = second;
            });
      });
    } else {
      const auto add = [&](int64_t row, int64_t channel, const PerChannel& coefficients, V* first,
                           V* second) MEMSAVE_EXT_INLINED {
        const int64_t start = row * piece.stride + channel * piece.channel_stride;
        for_vectors<Storage, kUnroll>(0, piece.width, 0,
                                      [&](int64_t column, auto size, int k) MEMSAVE_EXT_INLINED {
                                        V a, b;
                                        term(start + column, size, coefficients, a, b);
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
          const PerChannel coefficients(piece, channel);
          V first[kUnroll]{}, second[kUnroll]{};
          for (int64_t row = 0; row < piece.rows; ++row)
            add(row, channel, coefficients, first, second);
          finish(channel, first, second);
        }
      } else {
        for (int64_t row = 0; row < piece.rows; ++row) {
          for (int64_t channel = 0; channel < piece.channels; ++channel) {
            const PerChannel coefficients(piece, channel);
            V first[kUnroll]{}, second[kUnroll]{};
            add(row, channel, coefficients, first, second);
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
struct CoefficientsOfEach {
  MEMSAVE_EXT_INLINED CoefficientsOfEach(const Piece& piece, int64_t channel) {
    for (int v = 0; v < count; ++v) coefficients[v] = {piece, channel + v * kLanes<Storage>};
  }
  MEMSAVE_EXT_INLINED const auto& operator[](int v) const { return coefficients[v]; }

  Coefficients<Storage, true> coefficients[count];
};

template <typename Storage>
struct CoefficientsOfAll {
  MEMSAVE_EXT_INLINED const auto& operator[](int) const { return coefficients; }

  const Coefficients<Storage, false>& coefficients;
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
      for_lines<Storage>(
          head(first, whole), piece.width, whole,
          [&](int64_t column, auto size, auto vectors) MEMSAVE_EXT_INLINED {
            const CoefficientsOfEach<Storage, decltype(vectors)::kCount> coefficients(piece,
                                                                                      column);
            for (int k = 0; k < group; ++k) {
              body(first + k * next + column, size, coefficients, vectors);
            }
          });
    });
  };
  // Loads the coefficients of the next run early: a load can wait long behind streaming stores.
  const auto runs = [&](auto whole) MEMSAVE_EXT_INLINED {
    Coefficients<Storage, false> early(piece, 0);
    for_groups(piece.rows, [&](int64_t row, int64_t distance, int group) MEMSAVE_EXT_INLINED {
      for (int64_t channel = 0; channel < piece.channels; ++channel) {
        const Coefficients<Storage, false> coefficients = early;
        early = Coefficients<Storage, false>(piece, channel + 1 < piece.channels ? channel + 1 : 0);
        const int64_t first = row * piece.stride + channel * piece.channel_stride;
        const int64_t next = distance * piece.stride;
        for_lines<Storage>(head(first, whole), piece.width, whole,
                           [&](int64_t column, auto size, auto vectors) MEMSAVE_EXT_INLINED {
                             for (int k = 0; k < group; ++k) {
                               body(first + k * next + column, size,
                                    CoefficientsOfAll<Storage>{coefficients}, vectors);
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

// The tensors of a piece, as pointers to their type.
template <typename Storage, typename Activation>
struct Tensors {
  using V = Lanes<Storage>;

  MEMSAVE_EXT_INLINED explicit Tensors(const Piece& piece)
      : input(static_cast<const Storage*>(piece.input)),
        residual(static_cast<const Storage*>(piece.residual)),
        grad(static_cast<const Storage*>(piece.grad)),
        output(static_cast<Storage*>(piece.output)),
        grad_residual(static_cast<Storage*>(piece.grad_residual)),
        slope(broadcast<V>(static_cast<ValueOf<Storage>>(piece.slope))) {}

  // Returns the values before the activation.
  template <typename PerChannel, typename Size>
  MEMSAVE_EXT_INLINED V z(V x, const PerChannel& coefficients, int64_t place, Size size) const {
    const V normalized =
        normalize(x, coefficients[kMean], coefficients[kScale], coefficients[kBias]);
    return residual ? normalized + load(residual + place, size) : normalized;
  }

  template <typename PerChannel, typename Size>
  MEMSAVE_EXT_INLINED V z_gradient(V x, const PerChannel& coefficients, int64_t place,
                                   Size size) const {
    const V gradient = load(grad + place, size);
    if constexpr (std::is_same_v<Activation, Identity>) return gradient;
    return Activation::backward(gradient, z(x, coefficients, place, size), slope);
  }

  const Storage* input;
  const Storage* residual;
  const Storage* grad;
  Storage* output;
  Storage* grad_residual;
  V slope;
};

// Sets `means` to the mean of some values of each channel. It is near enough to the others that
// sums of their squared distances to it do not cancel, even if one of the values is an outlier.
template <typename Storage, bool channels_last>
MEMSAVE_EXT_INLINED inline void near_means(const Piece& piece, const Storage* input,
                                           ValueOf<Storage>* means) {
  using T = ValueOf<Storage>;
  using V = Lanes<Storage>;
  constexpr int64_t lanes = kLanes<Storage>;
  if constexpr (channels_last) {
    const int64_t rows = piece.rows < 8 ? piece.rows : 8 + (piece.rows - 8) / 32;
    for (int64_t column = 0; column < piece.width; column += lanes) {
      const int64_t left = piece.width - column;
      const Part part{left < lanes ? left : lanes};
      V sum{};
      for (int64_t r = 0; r < rows; ++r) sum += load(input + r * piece.stride + column, part);
      sum /= static_cast<T>(rows);
      __builtin_memcpy(means + column, &sum, sizeof(sum));
    }
  } else {
    constexpr int64_t wanted = 128 / lanes;
    const Part part{piece.width < lanes ? piece.width : lanes};
    for (int64_t channel = 0; channel < piece.channels; ++channel) {
      V sum{};
      int64_t vectors = 0;
      for (int64_t column = 0; column + part.lanes <= piece.width; column += lanes) {
        const Storage* from = input + channel * piece.channel_stride + column;
        for (int64_t row = 0; row < piece.rows && vectors < wanted; ++row, ++vectors) {
          sum += load(from + row * piece.stride, part);
        }
        if (vectors == wanted) break;
      }
      means[channel] = static_cast<T>(total(sum) / (vectors * part.lanes));
    }
  }
}

// Returns how far ahead of a value to prefetch, in elements. Processors themselves do it less well:
// they do not follow several rows, nor one row past the end of its page. Channels last: some rows
// further, in each of the streams. Channels first: the same channel in the next row, or with
// `by_channel` the next channel in the same row.
template <bool channels_last, bool by_channel>
MEMSAVE_EXT_INLINED inline int64_t places_ahead(const Piece& piece) {
  if (channels_last) return (1 + 512 / piece.stride) * piece.stride;
  if (by_channel && piece.channels > 1) return piece.channel_stride;
  return piece.rows > 1 ? piece.stride : 0;
}

// The values from which the deviations of the moments are counted: near_means().
template <typename Storage, bool channels_last>
struct Shift {
  using V = Lanes<Storage>;

  MEMSAVE_EXT_INLINED Shift(const Piece& piece, int64_t channel) {
    const auto* from = static_cast<const ValueOf<Storage>*>(piece.coefficients) + channel;
    value = channels_last ? load_raw<V>(from) : broadcast<V>(*from);
  }

  V value;
};

template <typename Storage, bool channels_last>
void moments_of(const Piece whole) {
  using V = Lanes<Storage>;
  const auto* input = static_cast<const Storage*>(whole.input);
  ValueOf<Storage> shifts[channels_last ? kMaxChannelsLast : kMaxChannelsFirst];
  near_means<Storage, channels_last>(whole, input, shifts);
  const int64_t ahead = places_ahead<channels_last, true>(whole);
  Piece piece = whole;
  piece.coefficients = shifts;
  const Sums<Storage, Shift<Storage, channels_last>, channels_last, true> sums(
      piece, [&](int64_t place, auto size, const auto& shift, V& deviation, V& square)
                 MEMSAVE_EXT_INLINED {
                   __builtin_prefetch(input + place + ahead);
                   deviation = keep(load(input + place, size) - shift.value, size);
                   square = deviation * deviation;
                 });
  const double share =
      1.0 / static_cast<double>(channels_last ? piece.rows : piece.rows * piece.width);
  for (int64_t c = 0; c < piece.channels; ++c) {
    const double sum = sums.get(c, 0);
    const double m2 = sums.get(c, 1) - sum * sum * share;
    piece.sums[c] = shifts[c] + sum * share;
    piece.sums[piece.sums_pitch + c] = m2 < 0 ? 0 : m2;
  }
}

template <typename Storage, typename Activation, bool channels_last>
void gradient_sums_of(const Piece piece) {
  using V = Lanes<Storage>;
  const Tensors<Storage, Activation> tensors(piece);
  const int64_t ahead = places_ahead<channels_last, false>(piece);
  const Sums<Storage, Coefficients<Storage, channels_last>, channels_last, false> sums(
      piece, [&](int64_t place, auto size, const auto& coefficients, V& gradient, V& product)
                 MEMSAVE_EXT_INLINED {
                   __builtin_prefetch(tensors.input + place + ahead);
                   __builtin_prefetch(tensors.grad + place + ahead);
                   const V x = load(tensors.input + place, size);
                   gradient = keep(tensors.z_gradient(x, coefficients, place, size), size);
                   product = keep(gradient * (x - coefficients[kMean]), size);
                 });
  for (int64_t c = 0; c < piece.channels; ++c) {
    piece.sums[c] = sums.get(c, 0);
    piece.sums[piece.sums_pitch + c] = sums.get(c, 1);
  }
}

template <typename Storage, typename Activation, bool channels_last>
void normalize_piece(const Piece piece) {
  const Tensors<Storage, Activation> tensors(piece);
  for_written<Storage, channels_last>(
      piece, piece.output,
      [&](int64_t place, auto size, const auto& coefficients, auto vectors) MEMSAVE_EXT_INLINED {
        constexpr int count = decltype(vectors)::kCount;
        Lanes<Storage> output[count];
        for (int v = 0; v < count; ++v) {
          const int64_t at = place + v * kLanes<Storage>;
          const auto z = tensors.z(load(tensors.input + at, size), coefficients[v], at, size);
          output[v] = Activation::forward(z, tensors.slope);
        }
        store_all(tensors.output + place, output, size);
      });
}

template <typename Storage, typename Activation, bool channels_last>
void input_gradient_piece(const Piece piece) {
  const Tensors<Storage, Activation> tensors(piece);
  for_written<Storage, channels_last>(
      piece, piece.output ? piece.output : piece.grad_residual,
      [&](int64_t place, auto size, const auto& coefficients, auto vectors) MEMSAVE_EXT_INLINED {
        constexpr int count = decltype(vectors)::kCount;
        Lanes<Storage> x[count], gradient[count];
        for (int v = 0; v < count; ++v) {
          const int64_t at = place + v * kLanes<Storage>;
          x[v] = load(tensors.input + at, size);
          gradient[v] = tensors.z_gradient(x[v], coefficients[v], at, size);
        }
        if (tensors.grad_residual) store_all(tensors.grad_residual + place, gradient, size);
        if (!tensors.output) return;
        for (int v = 0; v < count; ++v) {
          const auto& c = coefficients[v];
          gradient[v] = input_gradient(gradient[v], x[v], c[kMean], c[kInvstd], c[kScale],
                                       c[kGradMean], c[kDotMean]);
        }
        store_all(tensors.output + place, gradient, size);
      });
}

template <typename Storage, typename Activation>
struct PassesOf {
  static void moments(const Piece& piece) {
    piece.channels_last ? moments_of<Storage, true>(piece) : moments_of<Storage, false>(piece);
  }
  static void normalize(const Piece& piece) {
    piece.channels_last ? normalize_piece<Storage, Activation, true>(piece)
                        : normalize_piece<Storage, Activation, false>(piece);
  }
  static void gradient_sums(const Piece& piece) {
    piece.channels_last ? gradient_sums_of<Storage, Activation, true>(piece)
                        : gradient_sums_of<Storage, Activation, false>(piece);
  }
  static void input_gradient(const Piece& piece) {
    piece.channels_last ? input_gradient_piece<Storage, Activation, true>(piece)
                        : input_gradient_piece<Storage, Activation, false>(piece);
  }
  static constexpr Passes kPasses{moments, normalize, gradient_sums, input_gradient};
};

template <typename... All>
struct Table {
  static constexpr PassTable kPasses = {{{PassesOf<double, All>::kPasses...},
                                         {PassesOf<float, All>::kPasses...},
                                         {PassesOf<Half, All>::kPasses...},
                                         {PassesOf<BFloat16, All>::kPasses...}}};
};
const PassTable kPasses = Activations::Into<Table>::kPasses;

}  // namespace memsave_ext::batch_norm::cpu::MEMSAVE_EXT_ISA
