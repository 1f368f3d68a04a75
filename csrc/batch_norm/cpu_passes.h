// The passes over a piece, for the instruction set whose target region this is
// included in.
//
// Every value goes through the same vector code, tails too, so that its result
// does not depend on where it stands: forward and recompute write the same
// bits.
#include "batch_norm/cpu_vector.h"

namespace memsave_ext::batch_norm::cpu::MEMSAVE_EXT_ISA {

constexpr int kUnroll = 4;  // independent sums; rows of columns whose coefficients are loaded once

template <int rows>
struct Group {
  static constexpr int kRows = rows;
};

// Calls body(first row, Group) for all rows.
template <typename Body>
MEMSAVE_EXT_INLINED inline void for_groups(int64_t rows, const Body& body) {
  int64_t row = 0;
  for (; row + kUnroll <= rows; row += kUnroll) body(row, Group<kUnroll>{});
  for (; row < rows; ++row) body(row, Group<1>{});
}

// Calls body(column, size, k) for the vectors of `width` values, of which the first has `head`;
// k counts up to `unroll`, again and again.
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
  if (column < width) body(column, Part{width - column}, unroll - 1);
}

// Calls body(place, channel) for the runs of values of one channel.
template <typename Body>
MEMSAVE_EXT_INLINED inline void for_runs(const Piece& piece, const Body& body) {
  for (int64_t row = 0; row < piece.rows; ++row) {
    for (int64_t channel = 0; channel < piece.channels; ++channel) {
      body(row * piece.stride + channel * piece.channel_stride, channel);
    }
  }
}

// The coefficients of one channel, or with `columns` those of the channels from one on. Loaded at
// once: as far as a compiler can tell, a store could change them.
template <typename Storage, bool columns>
struct Coefficients {
  using V = Lanes<Storage>;

  MEMSAVE_EXT_INLINED Coefficients(const Piece& piece, int64_t channel) {
    const auto* from = static_cast<const Statistic<Storage>*>(piece.coefficients) + channel;
    for (int c = 0; c < kCoefficients; ++c, from += piece.pitch) {
      values[c] = columns ? load_raw<V>(from) : broadcast<V>(*from);
    }
  }
  MEMSAVE_EXT_INLINED V operator[](Coefficient which) const { return values[which]; }

  V values[kCoefficients];
};

// A piece's tensors by their type.
template <typename Storage, Activation activation>
struct Tensors {
  using V = Lanes<Storage>;

  MEMSAVE_EXT_INLINED explicit Tensors(const Piece& piece)
      : input(static_cast<const Storage*>(piece.input)),
        residual(static_cast<const Storage*>(piece.residual)),
        grad(static_cast<const Storage*>(piece.grad)),
        output(static_cast<Storage*>(piece.output)),
        grad_residual(static_cast<Storage*>(piece.grad_residual)),
        slope(broadcast<V>(static_cast<Statistic<Storage>>(piece.slope))) {}

  // Before the activation.
  template <typename Of, typename Size>
  MEMSAVE_EXT_INLINED V z(V x, const Of& of, int64_t place, Size size) const {
    const V normalized = normalize(x, of[kMean], of[kScale], of[kBias]);
    return residual ? normalized + load(residual + place, size) : normalized;
  }

  template <typename Of, typename Size>
  MEMSAVE_EXT_INLINED V z_gradient(V x, const Of& of, int64_t place, Size size) const {
    const V gradient = load(grad + place, size);
    if constexpr (activation == Activation::kIdentity) return gradient;
    return activate_backward<activation>(gradient, z(x, of, place, size), slope);
  }

  const Storage* input;
  const Storage* residual;
  const Storage* grad;
  Storage* output;
  Storage* grad_residual;
  V slope;
};

// Two sums for each channel of a piece: of what term(place, size, of, first, second) sets, where
// `of` is an Of(piece, channel).
template <typename Storage, typename Of, bool columns>
class Sums {
 public:
  using V = Lanes<Storage>;

  template <typename Term>
  MEMSAVE_EXT_INLINED Sums(const Piece& piece, const Term& term) {
    if constexpr (columns) {
      for_groups(piece.rows, [&](int64_t row, auto group) MEMSAVE_EXT_INLINED {
        for_vectors<Storage, 1>(0, piece.width, Whole{},
                                [&](int64_t column, auto size, int) MEMSAVE_EXT_INLINED {
                                  const Of of(piece, column);
                                  V* sums = values_[column / kLanes<Storage>];
                                  V first = sums[0], second = sums[1];
                                  for (int k = 0; k < decltype(group)::kRows; ++k) {
                                    V a, b;
                                    term((row + k) * piece.stride + column, size, of, a, b);
                                    first += a;
                                    second += b;
                                  }
                                  sums[0] = first;
                                  sums[1] = second;
                                });
      });
    } else {
      for_runs(piece, [&](int64_t start, int64_t channel) MEMSAVE_EXT_INLINED {
        const Of of(piece, channel);
        V first[kUnroll]{}, second[kUnroll]{};
        for_vectors<Storage, kUnroll>(0, piece.width, Whole{},
                                      [&](int64_t column, auto size, int k) MEMSAVE_EXT_INLINED {
                                        V a, b;
                                        term(start + column, size, of, a, b);
                                        first[k] += a;
                                        second[k] += b;
                                      });
        values_[channel][0] += (first[0] + first[1]) + (first[2] + first[3]);
        values_[channel][1] += (second[0] + second[1]) + (second[2] + second[3]);
      });
    }
  }

  double get(int64_t channel, int which) const {
    constexpr int64_t lanes = kLanes<Storage>;
    if constexpr (columns) return values_[channel / lanes][which][channel % lanes];
    return total(values_[channel][which]);
  }

 private:
  V values_[columns ? kMaxColumns / kLanes<Storage> : kMaxChannels][2] = {};
};

// For each channel the mean of some values: near enough that the squares of the
// others' distances to it do not cancel, even if one of them is an outlier.
template <typename Storage, bool columns>
MEMSAVE_EXT_INLINED inline void near_means(const Piece& piece, const Storage* input,
                                           Statistic<Storage>* means) {
  using T = Statistic<Storage>;
  using V = Lanes<Storage>;
  constexpr int64_t lanes = kLanes<Storage>;
  if constexpr (columns) {
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

template <typename Storage, bool columns>
struct Shift {
  using V = Lanes<Storage>;

  MEMSAVE_EXT_INLINED Shift(const Piece& piece, int64_t channel) {
    const auto* from = static_cast<const Statistic<Storage>*>(piece.coefficients) + channel;
    value = columns ? load_raw<V>(from) : broadcast<V>(*from);
  }

  V value;
};

template <typename Storage, bool columns>
void moments_of(const Piece of) {
  using V = Lanes<Storage>;
  const auto* input = static_cast<const Storage*>(of.input);
  Statistic<Storage> shifts[columns ? kMaxColumns : kMaxChannels];
  near_means<Storage, columns>(of, input, shifts);
  Piece piece = of;
  piece.coefficients = shifts;
  const Sums<Storage, Shift<Storage, columns>, columns> sums(
      piece, [&](int64_t place, auto size, const auto& shift, V& deviation, V& square)
                 MEMSAVE_EXT_INLINED {
                   deviation = keep(load(input + place, size) - shift.value, size);
                   square = deviation * deviation;
                 });
  const auto count = static_cast<double>(columns ? piece.rows : piece.rows * piece.width);
  for (int64_t c = 0; c < piece.channels; ++c) {
    const double sum = sums.get(c, 0);
    const double m2 = sums.get(c, 1) - sum * sum / count;
    piece.sums[c] = shifts[c] + sum / count;
    piece.sums[piece.sums_pitch + c] = m2 < 0 ? 0 : m2;
  }
}

template <typename Storage, Activation activation, bool columns>
void gradient_sums_of(const Piece piece) {
  using V = Lanes<Storage>;
  const Tensors<Storage, activation> tensors(piece);
  const Sums<Storage, Coefficients<Storage, columns>, columns> sums(
      piece,
      [&](int64_t place, auto size, const auto& of, V& gradient, V& product) MEMSAVE_EXT_INLINED {
        const V x = load(tensors.input + place, size);
        gradient = tensors.z_gradient(x, of, place, size);
        product = gradient * (x - of[kMean]);
      });
  for (int64_t c = 0; c < piece.channels; ++c) {
    piece.sums[c] = sums.get(c, 0);
    piece.sums[piece.sums_pitch + c] = sums.get(c, 1);
  }
}

// Calls body(place, size, coefficients) for all vectors of a piece, which it writes at `to` +
// place.
template <typename Storage, bool columns, typename Body>
MEMSAVE_EXT_INLINED inline void for_written(const Piece& piece, const void* to, const Body& body) {
  constexpr auto lanes = kLanes<Storage>;
  const auto rows = [&](int64_t row, auto group, int64_t head, auto whole) MEMSAVE_EXT_INLINED {
    for_vectors<Storage, 1>(head, piece.width, whole,
                            [&](int64_t column, auto size, int) MEMSAVE_EXT_INLINED {
                              const Coefficients<Storage, true> of(piece, column);
                              for (int k = 0; k < decltype(group)::kRows; ++k) {
                                body((row + k) * piece.stride + column, size, of);
                              }
                            });
  };
  const auto run = [&](int64_t start, int64_t channel, int64_t head,
                       auto whole) MEMSAVE_EXT_INLINED {
    const Coefficients<Storage, false> of(piece, channel);
    for_vectors<Storage, 1>(head, piece.width, whole,
                            [&](int64_t column, auto size, int)
                                MEMSAVE_EXT_INLINED { body(start + column, size, of); });
  };
  // Values before the first address that is fit for streaming.
  const auto offset = static_cast<int64_t>(reinterpret_cast<uintptr_t>(to) / sizeof(Storage));
  const auto head = [&](int64_t place) {
    const int64_t left = -(offset + place) & (lanes - 1);
    return left < piece.width ? left : piece.width;
  };
  if constexpr (columns) {
    if (!piece.stream) {
      for_groups(piece.rows, [&](int64_t row, auto group)
                                 MEMSAVE_EXT_INLINED { rows(row, group, 0, Whole{}); });
    } else {
      for (int64_t row = 0; row < piece.rows; ++row) {
        rows(row, Group<1>{}, head(row * piece.stride), Streamed{});
      }
    }
  } else if (!piece.stream) {
    for_runs(piece, [&](int64_t start, int64_t channel)
                        MEMSAVE_EXT_INLINED { run(start, channel, 0, Whole{}); });
  } else {
    for_runs(piece, [&](int64_t start, int64_t channel)
                        MEMSAVE_EXT_INLINED { run(start, channel, head(start), Streamed{}); });
  }
#if defined(__x86_64__)
  if (piece.stream) _mm_sfence();
#endif
}

template <typename Storage, Activation activation, bool columns>
void normalize_piece(const Piece piece) {
  const Tensors<Storage, activation> tensors(piece);
  for_written<Storage, columns>(
      piece, piece.output, [&](int64_t place, auto size, const auto& of) MEMSAVE_EXT_INLINED {
        const auto z = tensors.z(load(tensors.input + place, size), of, place, size);
        store(tensors.output + place, activate<activation>(z, tensors.slope), size);
      });
}

template <typename Storage, Activation activation, bool columns>
void input_gradient_piece(const Piece piece) {
  const Tensors<Storage, activation> tensors(piece);
  for_written<Storage, columns>(piece, piece.output ? piece.output : piece.grad_residual,
                                [&](int64_t place, auto size, const auto& of) MEMSAVE_EXT_INLINED {
                                  const auto x = load(tensors.input + place, size);
                                  const auto gradient = tensors.z_gradient(x, of, place, size);
                                  if (tensors.grad_residual)
                                    store(tensors.grad_residual + place, gradient, size);
                                  if (!tensors.output) return;
                                  const auto of_input =
                                      input_gradient(gradient, x, of[kMean], of[kInvstd],
                                                     of[kScale], of[kGradMean], of[kDotMean]);
                                  store(tensors.output + place, of_input, size);
                                });
}

template <typename Storage, Activation activation>
struct PassesOf {
  static void moments(const Piece& piece) {
    piece.columns ? moments_of<Storage, true>(piece) : moments_of<Storage, false>(piece);
  }
  static void normalize(const Piece& piece) {
    piece.columns ? normalize_piece<Storage, activation, true>(piece)
                  : normalize_piece<Storage, activation, false>(piece);
  }
  static void gradient_sums(const Piece& piece) {
    piece.columns ? gradient_sums_of<Storage, activation, true>(piece)
                  : gradient_sums_of<Storage, activation, false>(piece);
  }
  static void input_gradient(const Piece& piece) {
    piece.columns ? input_gradient_piece<Storage, activation, true>(piece)
                  : input_gradient_piece<Storage, activation, false>(piece);
  }
  static constexpr Passes kPasses{moments, normalize, gradient_sums, input_gradient};
};

#define MEMSAVE_EXT_PASSES(Storage)                   \
  {PassesOf<Storage, Activation::kIdentity>::kPasses, \
   PassesOf<Storage, Activation::kRelu>::kPasses,     \
   PassesOf<Storage, Activation::kLeakyRelu>::kPasses}

constexpr PassTable kPasses = {MEMSAVE_EXT_PASSES(double), MEMSAVE_EXT_PASSES(float),
                               MEMSAVE_EXT_PASSES(Half), MEMSAVE_EXT_PASSES(BFloat16)};

}  // namespace memsave_ext::batch_norm::cpu::MEMSAVE_EXT_ISA
