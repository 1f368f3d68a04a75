// The passes over a piece, for the instruction set in whose target region this file is included.
//
// All values go through the same vector code, those of partial vectors too, so that a result does
// not depend on a value's position: forward and recompute write the same bits.
#include "batch_norm/cpu/loops.h"

namespace memsave_ext::batch_norm::cpu::MEMSAVE_EXT_ISA {

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
  template <typename Of, typename Size>
  MEMSAVE_EXT_INLINED V z(V x, const Of& of, int64_t place, Size size) const {
    const V normalized = normalize(x, of[kMean], of[kScale], of[kBias]);
    return residual ? normalized + load(residual + place, size) : normalized;
  }

  template <typename Of, typename Size>
  MEMSAVE_EXT_INLINED V z_gradient(V x, const Of& of, int64_t place, Size size) const {
    const V gradient = load(grad + place, size);
    if constexpr (std::is_same_v<Activation, Identity>) return gradient;
    return Activation::backward(gradient, z(x, of, place, size), slope);
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
void moments_of(const Piece of) {
  using V = Lanes<Storage>;
  const auto* input = static_cast<const Storage*>(of.input);
  ValueOf<Storage> shifts[channels_last ? kMaxChannelsLast : kMaxChannelsFirst];
  near_means<Storage, channels_last>(of, input, shifts);
  const int64_t ahead = places_ahead<channels_last, true>(of);
  Piece piece = of;
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
      piece,
      [&](int64_t place, auto size, const auto& of, V& gradient, V& product) MEMSAVE_EXT_INLINED {
        __builtin_prefetch(tensors.input + place + ahead);
        __builtin_prefetch(tensors.grad + place + ahead);
        const V x = load(tensors.input + place, size);
        gradient = keep(tensors.z_gradient(x, of, place, size), size);
        product = keep(gradient * (x - of[kMean]), size);
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
      [&](int64_t place, auto size, const auto& of, auto vectors) MEMSAVE_EXT_INLINED {
        constexpr int count = decltype(vectors)::kCount;
        Lanes<Storage> output[count];
        for (int v = 0; v < count; ++v) {
          const int64_t at = place + v * kLanes<Storage>;
          const auto z = tensors.z(load(tensors.input + at, size), of[v], at, size);
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
      [&](int64_t place, auto size, const auto& of, auto vectors) MEMSAVE_EXT_INLINED {
        constexpr int count = decltype(vectors)::kCount;
        Lanes<Storage> x[count], gradient[count];
        for (int v = 0; v < count; ++v) {
          const int64_t at = place + v * kLanes<Storage>;
          x[v] = load(tensors.input + at, size);
          gradient[v] = tensors.z_gradient(x[v], of[v], at, size);
        }
        if (tensors.grad_residual) store_all(tensors.grad_residual + place, gradient, size);
        if (!tensors.output) return;
        for (int v = 0; v < count; ++v) {
          const auto& o = of[v];
          gradient[v] = input_gradient(gradient[v], x[v], o[kMean], o[kInvstd], o[kScale],
                                       o[kGradMean], o[kDotMean]);
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
