// How a tensor is cut into pieces. That depends on its shape alone, so that results have the same
// bits whatever the number of threads.
#pragma once

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <utility>

#include "batch_norm/cpu/piece.h"
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

}  // namespace memsave_ext::batch_norm::cpu
