// Cuts a tensor into pieces, and runs passes over them on torch's threads. How it is cut depends on
// its shape alone, so that results have the same bits whatever the number of threads.
//
// Where a unit of channels fits into a core's cache and there are enough units for all threads, a
// thread takes a unit from its sums to its output. Otherwise all sums come first; the output
// follows in reverse order, from what was read last.
#pragma once

#include <ATen/Parallel.h>

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <utility>
#include <vector>

#include "batch_norm/cpu/loops.h"
#include "batch_norm/kernels.h"

namespace memsave_ext::batch_norm::cpu {

// How many neighbouring rows are taken as one, with channels last: so many that each begins with a
// cache line. To the passes they are one row with more channels; the sums of a channel over each of
// them are merged like those of blocks.
inline int64_t joined_rows(const Problem& problem) {
  if (problem.inner > 1 || problem.channels == 1) return 1;
  const int64_t line = 64 / item_size(problem.dtype);
  const int64_t joined = line / std::gcd(line, problem.channels);
  return problem.outer % joined == 0 && problem.outer >= 64 * joined ? joined : 1;
}

// A tensor is cut into units of channels, and each unit into blocks of values.
class Partition {
 public:
  // `sums`: whether a pass sums over channels. If none does, a piece may, channels first, have any
  // number of channels.
  Partition(const Problem& problem, bool sums)
      : joined_(joined_rows(problem)),
        outer_(problem.outer / joined_),
        inner_(problem.inner),
        channels_(problem.channels * joined_) {
    if (channels_ == 1) {
      inner_ *= outer_;
      outer_ = 1;
    }
    channels_last_ = inner_ == 1;
    if (channels_last_) {
      unit_channels_ = std::min(channels_, kMaxChannelsLast);
      rows_ = even_rows(65536 / std::max<int64_t>(unit_channels_, 1));
    } else {
      // Where no pass sums, a piece has four rows, which are written together. That gains nothing
      // with 16 bits, whose conversion takes longest, unless the rows can be streamed.
      const bool converts = item_size(problem.dtype) == 2 && inner_ < 512;
      cut_ = sums || converts ? kPieceValues : kPieceValues / 4;
      cuts_ = (inner_ + cut_ - 1) / cut_;
      const int64_t run = (sums ? kRunValues : cut_) / std::max<int64_t>(inner_, 1);
      const int64_t most = sums ? std::min(channels_, kMaxChannelsFirst) : channels_;
      unit_channels_ = std::clamp<int64_t>(run, 1, most);
      rows_ = std::max<int64_t>(
          kPieceValues / std::max<int64_t>(std::min(inner_, cut_) * unit_channels_, 1), 1);
    }
    blocks_ = (outer_ + rows_ - 1) / rows_ * cuts_;
    units_ = (channels_ + unit_channels_ - 1) / unit_channels_;
  }

  int64_t units() const { return units_; }
  int64_t blocks() const { return blocks_; }
  bool channels_last() const { return channels_last_; }
  int64_t joined() const { return joined_; }
  int64_t channels() const { return channels_; }                       // of all joined rows
  int64_t run() const { return channels_last_ ? channels_ : inner_; }  // values
  int64_t unit_channels() const { return unit_channels_; }
  int64_t channel(int64_t unit) const { return unit * unit_channels_; }
  int64_t channels_of(int64_t unit) const {
    return std::min(unit_channels_, channels_ - channel(unit));
  }

  // Returns the values per channel of a block.
  int64_t count(int64_t block) const { return rows(block) * (channels_last_ ? 1 : width(block)); }

  // Returns the unit and block of a piece. Pieces are counted in the order of addresses, as far as
  // they have one.
  std::pair<int64_t, int64_t> unit_and_block(int64_t piece) const {
    return {piece % units_, piece / units_};
  }

  // Sets the extent of a piece, and returns its offset in the tensor, in elements.
  int64_t place(Piece& piece, int64_t unit, int64_t block) const {
    piece.channels_last = channels_last_;
    piece.rows = rows(block);
    piece.stride = channels_ * inner_;
    piece.channels = channels_of(unit);
    piece.channel_stride = inner_;
    piece.width = channels_last_ ? piece.channels : width(block);
    const int64_t row = block / cuts_ * rows_;
    return row * piece.stride + channel(unit) * inner_ + block % cuts_ * cut_;
  }

 private:
  static constexpr int64_t kPieceValues = 32768;  // values of a piece, of one or more channels
  static constexpr int64_t kRunValues = 1024;     // contiguous values, if a pass sums

  // About so many rows, 128 to 512, in an even number of blocks that are nearly equal: a last block
  // of a few rows would leave one of two threads with less to do than the other.
  int64_t even_rows(int64_t about) const {
    const int64_t most = std::clamp<int64_t>(about, 128, 512);
    if (outer_ <= most) return most;
    const int64_t pairs = (outer_ + 2 * most - 1) / (2 * most);
    const int64_t rows = (outer_ + 2 * pairs - 1) / (2 * pairs);
    // The passes take four rows at a time, a quarter of the block apart. Were the distance a power
    // of two, they would have the same places in the first cache.
    const int64_t quarter = (rows + 3) / 4;
    return 4 * (quarter | 1);
  }

  int64_t rows(int64_t block) const { return std::min(rows_, outer_ - block / cuts_ * rows_); }
  int64_t width(int64_t block) const { return std::min(cut_, inner_ - block % cuts_ * cut_); }

  int64_t joined_, outer_, inner_, channels_;
  bool channels_last_;
  int64_t unit_channels_ = 1;
  int64_t rows_;
  int64_t cut_ = kPieceValues;  // most values of a row's piece
  int64_t cuts_ = 1;            // pieces of a row
  int64_t blocks_, units_;
};

constexpr int64_t kGrain = 32768;            // values that are worth a thread
constexpr int64_t kCachedBytes = 2 << 20;    // up to here, a unit stays in cache between passes
constexpr int64_t kStreamedBytes = 4 << 20;  // from here to kFreshBytes, an output bypasses caches

// The matrix of coefficients that the passes read: a row per Coefficient, a column per channel of
// all joined rows.
template <typename T>
class Coefficients {
 public:
  explicit Coefficients(const Problem& problem)
      : channels_(problem.channels),
        columns_(channels_ * joined_rows(problem)),
        pitch_(columns_ + kPadding),
        values_(kCoefficients * pitch_),
        weight_(static_cast<const T*>(problem.weight)),
        bias_(static_cast<const T*>(problem.bias)) {}

  Coefficients(const Problem& problem, const void* statistics) : Coefficients(problem) {
    const auto* mean = static_cast<const T*>(statistics);
    for (int64_t c = 0; c < problem.channels; ++c) set(c, mean[c], mean[problem.channels + c]);
  }

  void set(int64_t channel, T mean, T invstd) {
    set(kMean, channel, mean);
    set(kInvstd, channel, invstd);
    set(kScale, channel, weight_ ? invstd * weight_[channel] : invstd);
    set(kBias, channel, bias_ ? bias_[channel] : T(0));
  }

  void set_means(int64_t channel, T grad_mean, T dot_mean) {
    set(kGradMean, channel, grad_mean);
    set(kDotMean, channel, dot_mean);
  }

  T get(Coefficient which, int64_t channel) const { return values_[which * pitch_ + channel]; }
  const T* of_channel(int64_t channel) const { return values_.data() + channel; }
  int64_t pitch() const { return pitch_; }

 private:
  void set(Coefficient which, int64_t channel, T value) {
    T* row = values_.data() + which * pitch_;
    for (; channel < columns_; channel += channels_) row[channel] = value;
  }

  int64_t channels_, columns_, pitch_;
  std::vector<T> values_;
  const T* weight_;
  const T* bias_;
};

class Run {
 public:
  template <typename T>
  Run(const Problem& problem, const Coefficients<T>& coefficients, bool sums)
      : problem_(problem), partition_(problem, sums) {
    whole_.slope = problem.negative_slope;
    whole_.input = problem.input;
    whole_.residual = problem.residual;
    whole_.coefficients = coefficients.of_channel(0);
    whole_.pitch = coefficients.pitch();
    coefficient_size_ = sizeof(T);
  }

  const Partition& partition() const { return partition_; }

  Run& read(const void* grad) {
    whole_.grad = grad;
    // Without an activation the gradient does not depend on z.
    if (problem_.activation == Activation::kIdentity) whole_.residual = nullptr;
    return *this;
  }

  Run& write(void* output, void* grad_residual = nullptr) {
    whole_.output = output;
    whole_.grad_residual = grad_residual;
    const auto distance = static_cast<char*>(output) - static_cast<char*>(grad_residual);
    const bool alike = !output || !grad_residual || distance % 64 == 0;
    whole_.stream = alike && streams_well();
    return *this;
  }

  // Calls apply(piece) for all pieces.
  template <typename Apply>
  void operator()(const Apply& apply) const {
    for_pieces(false, apply);
  }

  // Calls reduce(piece), which sets piece.sums; then finish(first channel, channels, sums, pitch),
  // which gets the sums of all blocks; then apply(piece).
  template <typename Reduce, typename Finish, typename Apply>
  void operator()(const Reduce& reduce, const Finish& finish, const Apply& apply) const {
    const int64_t units = partition_.units(), blocks = partition_.blocks();
    const int threads = at::get_num_threads();
    if (cached_bytes() > kCachedBytes || (threads > 1 && units < 4 * threads) ||
        partition_.joined() > 1) {
      const int64_t pitch = partition_.channels();
      std::vector<double> sums(2 * pitch * blocks);
      for_pieces(false, reduce, sums.data(), pitch);
      at::parallel_for(0, problem_.channels, grain(2 * blocks), [&](int64_t begin, int64_t end) {
        finish(begin, end - begin, sums.data() + begin, pitch);
      });
      for_pieces(true, apply);
      return;
    }
    const int64_t pitch = partition_.unit_channels();
    at::parallel_for(0, units, grain(problem_.count() * pitch), [&](int64_t begin, int64_t end) {
      std::vector<double> sums(2 * pitch * blocks);
      for (int64_t unit = begin; unit < end; ++unit) {
        for (int64_t block = 0; block < blocks; ++block) {
          reduce(piece(unit, block, sums.data() + 2 * pitch * block, pitch));
        }
        finish(partition_.channel(unit), partition_.channels_of(unit), sums.data(), pitch);
        for (int64_t block = blocks; block-- > 0;) apply(piece(unit, block));
      }
    });
  }

 private:
  // Whether streaming pays off. Fresh pages lie in the caches, as the system has just cleared them.
  // A cache line that is partly streamed and partly stored costs many times as much; rows that are
  // written together have to begin alike.
  bool streams_well() const {
    const int64_t size = item_size(problem_.dtype);
    if (tensor_bytes() < kStreamedBytes || tensor_bytes() >= kFreshBytes) return false;
    const int64_t run = partition_.run() * size,
                  row = problem_.channels * problem_.inner * size * partition_.joined();
    return run % 64 == 0 || (run >= 1024 && row % 64 == 0);
  }

  static int64_t grain(int64_t values) { return 1 + kGrain / (1 + values); }

  int64_t tensor_bytes() const {
    return problem_.count() * problem_.channels * item_size(problem_.dtype);
  }
  int64_t cached_bytes() const {
    return tensor_bytes() / std::max<int64_t>(partition_.units(), 1) * (whole_.grad ? 2 : 1);
  }

  template <typename Body>
  void for_pieces(bool backwards, const Body& body, double* sums = nullptr,
                  int64_t pitch = 0) const {
    const int64_t units = partition_.units(), pieces = units * partition_.blocks();
    const int64_t values = problem_.count() * problem_.channels / std::max<int64_t>(pieces, 1);
    at::parallel_for(0, pieces, grain(values), [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        const auto [unit, block] = partition_.unit_and_block(backwards ? begin + end - 1 - i : i);
        body(piece(unit, block, sums + 2 * pitch * block + partition_.channel(unit), pitch));
      }
    });
  }

  Piece piece(int64_t unit, int64_t block, double* sums = nullptr, int64_t pitch = 0) const {
    Piece piece = whole_;
    const int64_t place = partition_.place(piece, unit, block) * item_size(problem_.dtype);
    move(piece.input, place);
    move(piece.residual, place);
    move(piece.grad, place);
    move(piece.output, place);
    move(piece.grad_residual, place);
    move(piece.coefficients, partition_.channel(unit) * coefficient_size_);
    piece.sums = sums;
    piece.sums_pitch = pitch;
    return piece;
  }

  static void move(const void*& pointer, int64_t bytes) {
    if (pointer) pointer = static_cast<const char*>(pointer) + bytes;
  }
  static void move(void*& pointer, int64_t bytes) {
    if (pointer) pointer = static_cast<char*>(pointer) + bytes;
  }

  const Problem& problem_;
  Partition partition_;
  Piece whole_{};
  int64_t coefficient_size_;
};

}  // namespace memsave_ext::batch_norm::cpu
