// Runs passes over the pieces of a tensor, on torch's threads.
//
// Where a unit of channels fits into a core's cache and there are enough units for all threads, a
// thread takes a unit from its sums to its output. Otherwise all sums come first; the output
// follows in reverse order, from what was read last.
#pragma once

#include <ATen/Parallel.h>

#include <algorithm>
#include <cstdint>
#include <vector>

#include "batch_norm/cpu/partition.h"
#include "batch_norm/cpu/piece.h"
#include "batch_norm/kernels.h"

namespace memsave_ext::batch_norm::cpu {

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
    const auto* given = static_cast<const T*>(statistics);
    for (int64_t c = 0; c < problem.channels; ++c) set(c, given[c], given[problem.channels + c]);
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
