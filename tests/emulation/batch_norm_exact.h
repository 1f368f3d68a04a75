// What batch norm's kernels should compute, in long double, and how far from it they may be. With u
// half a unit in the last place of the type of the sums, and a thread that adds t values of a
// channel in that type before sums go on in double: t u of the sum of magnitudes, and u for each
// operation around it. Then half a unit of the type that is stored.
#pragma once

#include "batch_norm/cuda/partition.cuh"
#include "batch_norm/kernels.h"
#include "driver.h"

namespace emulation {

using memsave_ext::batch_norm::Activation;
using memsave_ext::batch_norm::Activations;
using memsave_ext::batch_norm::Problem;
using memsave_ext::vector::DType;
using Exact = long double;

// A number, and what a result may be away from it.
struct Bounded {
  Exact value = 0, bound = 0;
};

inline Stored stored(DType type) {
  return type == DType::kDouble  ? Stored::kDouble
         : type == DType::kFloat ? Stored::kFloat
         : type == DType::kHalf  ? Stored::kHalf
                                 : Stored::kBFloat16;
}

inline Stored sums_of(DType type) {
  return type == DType::kDouble ? Stored::kDouble : Stored::kFloat;
}

// Half a unit in the last place, relative to the value, and the least there is.
inline Exact half_unit(Stored type) {
  return type == Stored::kDouble  ? 0x1p-53L
         : type == Stored::kFloat ? 0x1p-24L
         : type == Stored::kHalf  ? 0x1p-11L
                                  : 0x1p-8L;
}

// The value as it is stored: by one rounding more where that type is not the one of the sums.
inline Bounded rounded_to(Stored type, Stored computed, Bounded x) {
  if (type == computed) return x;
  x.bound += half_unit(type) * (std::fabs(x.value) + x.bound) + 0x1p-25L;
  return x;
}

// The largest error that was seen, in its bound.
inline double worst_share = 0;

inline void expect_near(double found, const Bounded& expected, const char* what, size_t at) {
  ++checks;
  if (std::isnan(found) && std::isnan(expected.value)) return;
  const Exact error = std::fabs(static_cast<Exact>(found) - expected.value);
  if (!(error <= expected.bound)) {
    fail("batch norm: %s %zu is %.17g, not %.17Lg: away by %.3Lg, allowed are %.3Lg", what, at,
         found, expected.value, error, expected.bound);
  }
  if (expected.bound > 0) worst_share = std::fmax(worst_share, error / expected.bound);
}

// Values of a channel that a thread may add up by itself, whichever of the kernels' ways is taken.
inline Exact terms(const Problem& problem) {
  using namespace memsave_ext::batch_norm;
  Exact most = 0;
  const bool channels_last = is_channels_last(problem);
  const auto try_these = [&](const Loads& loads) {
    const Partition p = make_partition(problem, loads);
    const int64_t items = ceil_div(p.per_chunk, p.lanes_y);
    const int64_t on_chip = channels_last ? 0 : ceil_div(p.items, 128);
    most = std::fmax(most, std::max(items, on_chip) * (channels_last ? 1 : loads.vector));
  };
  for (const int vector : {1, 4, 8}) {
    if (length_of(problem) % vector == 0) try_these({vector});
  }
  if (can_mask(problem)) try_these({*vectors(problem.dtype).begin(), true});
  return most;
}

// Of a channel: its values are at(0) to at(count - 1).
class Channel {
 public:
  Channel(const Problem& problem, int64_t channel) : problem_(problem), channel_(channel) {}

  int64_t count() const { return problem_.count(); }
  size_t at(int64_t i) const {
    const int64_t outer = i / problem_.inner, inner = i % problem_.inner;
    return (outer * problem_.channels + channel_) * problem_.inner + inner;
  }

 private:
  const Problem& problem_;
  int64_t channel_;
};

struct ExactMoments {
  Bounded mean, m2;
};

// A thread's deviations are from its first value: their squares add up to twice m2, more or less.
// Then they are from the channel's first value, in double, by sums of threads, warps and chunks.
inline ExactMoments moments_of(const Problem& problem, const Memory& input, int64_t c) {
  const Channel channel(problem, c);
  const Exact u = half_unit(sums_of(problem.dtype)), t = terms(problem) + 4;
  const Exact count = channel.count();
  Exact sum = 0, m2 = 0;
  for (int64_t i = 0; i < channel.count(); ++i) sum += input.get(channel.at(i));
  const Exact mean = sum / count;
  for (int64_t i = 0; i < channel.count(); ++i) {
    const Exact deviation = input.get(channel.at(i)) - mean;
    m2 += deviation * deviation;
  }
  const Exact origin = input.get(channel.at(0)) - mean, spread = std::sqrt(2 * m2 / count);
  const Exact in_double = 16 * half_unit(Stored::kDouble);
  return {{mean, t * u * spread + in_double * std::fabs(origin) + u * std::fabs(mean)},
          {m2, 2 * t * u * m2 + in_double * (m2 + count * origin * origin)}};
}

// What a channel's values go through, from statistics as they are stored.
struct ExactAffine {
  Exact mean, invstd, weight, bias, u, slope;
  Activation activation;

  // z, and the error of what is computed of it.
  Bounded preactivation(Exact x, Exact residual) const {
    const Exact product = (x - mean) * (invstd * weight);
    const Exact magnitude = std::fabs(product) + std::fabs(bias) + std::fabs(residual);
    return {product + bias + residual, 6 * u * magnitude};
  }

  Bounded output(Exact x, Exact residual) const {
    Bounded z = preactivation(x, residual);
    z.value = Activations::forward(activation, z.value, slope);
    z.bound += u * std::fabs(z.value);
    return z;
  }

  // The gradient of z. Where the sign of z is in doubt the bound is as large as the gradient.
  Bounded gradient(Exact grad, Exact x, Exact residual) const {
    const Bounded z = preactivation(x, residual);
    const Exact value = Activations::backward(activation, grad, z.value, slope);
    const bool sure = activation == Activation::kIdentity || std::fabs(z.value) > z.bound;
    return {value, sure ? u * std::fabs(value) : std::fabs(grad)};
  }
};

}  // namespace emulation
