// The kernels for CPUs. They run the passes over the values, and compute here what follows from the
// sums over a channel.
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <cmath>
#include <limits>
#include <type_traits>

#include "batch_norm/cpu/run.h"

namespace memsave_ext::batch_norm {

const cpu::PassTable& cpu::passes() {
  static const PassTable& chosen = MEMSAVE_EXT_TABLE_OF_THIS_CPU(kPasses);
  return chosen;
}

namespace {

using cpu::Coefficients;
using cpu::Partition;
using cpu::Passes;
using cpu::Piece;
using cpu::Run;

const Passes& passes_for(const Problem& problem) {
  return cpu::passes()
      .passes[static_cast<int>(problem.dtype)][static_cast<int>(problem.activation)];
}

// Computes a channel's moments again in double, where the sums of the pass overflowed or a value is
// not finite.
template <typename T>
void exact_moments(const Piece& piece, int64_t channel) {
  const auto* input = static_cast<const T*>(piece.input) +
                      channel * (piece.channels_last ? 1 : piece.channel_stride);
  const int64_t width = piece.channels_last ? 1 : piece.width;
  const auto sum_of = [&](double mean, auto term) {
    double sum = 0;
    for (int64_t row = 0; row < piece.rows; ++row) {
      for (int64_t i = 0; i < width; ++i) {
        sum += term(static_cast<double>(input[row * piece.stride + i]) - mean);
      }
    }
    return sum;
  };
  const double mean = sum_of(0, [](double x) { return x; }) / (piece.rows * width);
  piece.sums[channel] = mean;
  piece.sums[piece.sums_pitch + channel] = sum_of(mean, [](double x) { return x * x; });
}

void moments_of(const Passes& passes, DType dtype, const Piece& piece) {
  passes.moments(piece);
  for (int64_t channel = 0; channel < piece.channels; ++channel) {
    if (std::isfinite(piece.sums[piece.sums_pitch + channel])) continue;
    switch (dtype) {
      case DType::kDouble:
        exact_moments<double>(piece, channel);
        break;
      case DType::kFloat:
        exact_moments<float>(piece, channel);
        break;
      case DType::kHalf:
        exact_moments<c10::Half>(piece, channel);
        break;
      case DType::kBFloat16:
        exact_moments<c10::BFloat16>(piece, channel);
    }
  }
}

// Calls body(sums, count) for the sums of each block and each of its joined rows, but not for the
// first, always in the same order.
template <typename Body>
void for_others(const Partition& partition, const double* sums, int64_t pitch, const Body& body) {
  const int64_t joined = partition.joined(), distance = partition.channels() / joined;
  for (int64_t i = 1; i < partition.blocks() * joined; ++i) {
    const int64_t block = i / joined;
    body(sums + 2 * pitch * block + i % joined * distance, partition.count(block));
  }
}

// Merges all moments into the first ones.
void merge_moments(const Partition& partition, int64_t channels, double* sums, int64_t pitch) {
  double *mean = sums, *m2 = sums + pitch;
  int64_t count = partition.count(0);
  for_others(partition, sums, pitch, [&](const double* other, int64_t other_count) {
    for (int64_t c = 0; c < channels; ++c) {
      const Moments<double> merged =
          merge<double>({count, mean[c], m2[c]}, {other_count, other[c], other[pitch + c]});
      // Where the merged mean is not finite, the sum of both is what IEEE gives; m2 is NaN already.
      mean[c] = std::isfinite(merged.mean) ? merged.mean : mean[c] + other[c];
      m2[c] = merged.m2;
    }
    count += other_count;
  });
}

// Adds all sums to the first ones.
void add_sums(const Partition& partition, int64_t channels, double* sums, int64_t pitch) {
  for_others(partition, sums, pitch, [&](const double* other, int64_t) {
    for (int64_t c = 0; c < channels; ++c) {
      sums[c] += other[c];
      sums[pitch + c] += other[pitch + c];
    }
  });
}

void nothing(const Piece&) {}

void moments_kernel(const Problem& problem, void* moments, void*) {
  const Passes& passes = passes_for(problem);
  with_statistic(problem.dtype, [&](auto type) {
    using T = decltype(type);
    auto* out = static_cast<T*>(moments);
    const Coefficients<T> unused(problem);
    Run run(problem, unused, true);
    run([&](const Piece& piece) { moments_of(passes, problem.dtype, piece); },
        [&](int64_t first, int64_t channels, double* sums, int64_t pitch) {
          merge_moments(run.partition(), channels, sums, pitch);
          for (int64_t c = 0; c < channels; ++c) {
            out[first + c] = static_cast<T>(sums[c]);
            out[problem.channels + first + c] = static_cast<T>(sums[pitch + c]);
          }
        },
        nothing);
  });
}

void forward_kernel(const Problem& problem, double eps, const Running& running, void* statistics,
                    void* output, void*) {
  const Passes& passes = passes_for(problem);
  with_statistic(problem.dtype, [&](auto type) {
    using T = decltype(type);
    auto* out = static_cast<T*>(statistics);
    const auto count = static_cast<double>(problem.count());
    Coefficients<T> coefficients(problem);
    Run run(problem, coefficients, true);
    run.write(output);
    run([&](const Piece& piece) { moments_of(passes, problem.dtype, piece); },
        [&](int64_t first, int64_t channels, double* sums, int64_t pitch) {
          merge_moments(run.partition(), channels, sums, pitch);
          for (int64_t c = 0; c < channels; ++c) {
            const double mean = sums[c], m2 = sums[pitch + c];
            const int64_t channel = first + c;
            out[channel] = static_cast<T>(mean);
            out[problem.channels + channel] = static_cast<T>(1 / std::sqrt(m2 / count + eps));
            coefficients.set(channel, out[channel], out[problem.channels + channel]);
            update<T>(running.mean, channel, running.momentum, mean);
            update<T>(running.var, channel, running.momentum, m2 / (count - 1));
          }
        },
        passes.normalize);
  });
}

void running_kernel(const Problem& problem, double eps, const Running& running, void* statistics,
                    void*) {
  with_statistic(problem.dtype, [&](auto type) {
    using T = decltype(type);
    const auto *mean = static_cast<const T*>(running.mean),
               *var = static_cast<const T*>(running.var);
    auto* out = static_cast<T*>(statistics);
    for (int64_t c = 0; c < problem.channels; ++c) {
      out[c] = mean[c];
      out[problem.channels + c] = invstd_of(var[c], eps);
    }
  });
}

void normalize_kernel(const Problem& problem, const void* statistics, void* output, void*) {
  with_statistic(problem.dtype, [&](auto type) {
    const Coefficients<decltype(type)> coefficients(problem, statistics);
    Run(problem, coefficients, false).write(output)(passes_for(problem).normalize);
  });
}

void backward_kernel(const Problem& problem, const void* statistics, bool training,
                     const void* grad, void* grad_input, void* grad_residual, void* grad_weight,
                     void* grad_bias, void*) {
  const Passes& passes = passes_for(problem);
  with_statistic(problem.dtype, [&](auto type) {
    using T = decltype(type);
    auto *weight = static_cast<T*>(grad_weight), *bias = static_cast<T*>(grad_bias);
    const auto count = static_cast<double>(problem.count());
    Coefficients<T> coefficients(problem, statistics);
    const bool sums = grad_weight || grad_bias || (training && grad_input);
    const bool gradients = grad_input || grad_residual;
    Run run(problem, coefficients, sums);
    run.read(grad).write(grad_input, grad_residual);
    const auto finish = [&](int64_t first, int64_t channels, double* sums, int64_t pitch) {
      add_sums(run.partition(), channels, sums, pitch);
      for (int64_t c = 0; c < channels; ++c) {
        const int64_t channel = first + c;
        const double sum = sums[c];
        const double dot = sums[pitch + c] * coefficients.get(cpu::kInvstd, channel);
        if (weight) weight[channel] = static_cast<T>(dot);
        if (bias) bias[channel] = static_cast<T>(sum);
        if (training) coefficients.set_means(channel, sum / count, dot / count);
      }
    };
    if (sums && gradients) run(passes.gradient_sums, finish, passes.input_gradient);
    if (sums && !gradients) run(passes.gradient_sums, finish, nothing);
    if (!sums && gradients) run(passes.input_gradient);
  });
}

void backward_sums_kernel(const Problem& problem, const void* statistics, const void* grad,
                          void* sums, void*) {
  auto* bias = static_cast<char*>(sums);
  backward_kernel(problem, statistics, false, grad, nullptr, nullptr,
                  bias + problem.channels * statistic_bytes(problem.dtype), bias, nullptr);
}

void backward_input_kernel(const Problem& problem, const void* statistics, const void* means,
                           const void* grad, void* grad_input, void* grad_residual, void*) {
  with_statistic(problem.dtype, [&](auto type) {
    using T = decltype(type);
    const auto* mean = static_cast<const T*>(means);
    Coefficients<T> coefficients(problem, statistics);
    for (int64_t c = 0; c < problem.channels; ++c) {
      coefficients.set_means(c, mean[c], mean[problem.channels + c]);
    }
    Run run(problem, coefficients, false);
    run.read(grad).write(grad_input, grad_residual)(passes_for(problem).input_gradient);
  });
}

}  // namespace

const Kernels cpu_kernels = {moments_kernel,       forward_kernel,  running_kernel,
                             normalize_kernel,     backward_kernel, backward_sums_kernel,
                             backward_input_kernel};

}  // namespace memsave_ext::batch_norm
