// One call of each of batch norm's kernels, and what is checked of it.
#pragma once

#include "batch_norm_exact.h"

namespace emulation {

using memsave_ext::batch_norm::cuda_kernels;

struct Case {
  DType dtype;
  int64_t outer, channels, inner;
  int activation = 0;
  bool residual = false, affine = false;
  int offset = 0;        // of every tensor of values
  int input_offset = 0;  // more of it for the input: other tensors are aligned otherwise
  bool affine_like_input = false;
};

inline constexpr double kEps = 1e-3, kMomentum = 0.125, kSlope = 0.25;

class Run {
 public:
  Run(const Case& of) : of_(of), generator_(of.outer + 31 * of.channels + 7 * of.inner) {
    problem_.dtype = of.dtype;
    problem_.outer = of.outer;
    problem_.channels = of.channels;
    problem_.inner = of.inner;
    problem_.activation = static_cast<Activation>(of.activation);
    problem_.negative_slope = kSlope;
    input_ =
        Memory(stored(of.dtype), of.outer * of.channels * of.inner, of.offset + of.input_offset);
    grad_ = values();
    residual_ = of.residual ? values() : Memory();
    for (Memory* vector : {&weight_, &bias_, &running_[0], &running_[1]}) {
      const bool affine = vector == &weight_ || vector == &bias_;
      *vector = affine && of.affine_like_input ? Memory(stored(of.dtype), of.channels, of.offset)
                                               : channels(1);
      for (int64_t c = 0; c < of.channels; ++c) vector->set(c, normal(generator_));
    }
    fill();
    problem_.input = input_.at();
    problem_.residual = residual_.at();
    if (of.affine) {
      problem_.weight = weight_.at();
      problem_.bias = bias_.at();
      problem_.affine_like_input = of.affine_like_input;
    }
    workspace_ = Memory(Stored::kBits8, cuda_kernels.workspace_bytes(problem_));
    problem_.workspace = workspace_.at();
  }

  // All results; those of one order are compared with what they should be, of others with these.
  std::vector<Memory> results(bool check) {
    std::vector<Memory> kept;
    forward(check, kept);
    running(check, kept);
    for (const bool training : {true, false}) backward(training, check, kept);
    parts(check, kept);
    return kept;
  }

 private:
  Memory values() const {
    return Memory(stored(of_.dtype), of_.outer * of_.channels * of_.inner, of_.offset);
  }
  Memory channels(int count) const {
    return Memory(sums_of(of_.dtype), count * of_.channels, of_.offset);
  }

  // Means that are large beside the deviations, in some channels.
  void fill() {
    for (int64_t c = 0; c < of_.channels; ++c) {
      const Channel channel(problem_, c);
      const double mean = c % 3 == 0 ? 8 * normal(generator_) : 0;
      for (int64_t i = 0; i < channel.count(); ++i) {
        input_.set(channel.at(i), mean + normal(generator_));
        grad_.set(channel.at(i), normal(generator_) + 0.25);
        if (of_.residual) residual_.set(channel.at(i), normal(generator_));
      }
    }
  }

  ExactAffine affine(const Memory& statistics, int64_t c) const {
    return {statistics.get(c),
            statistics.get(of_.channels + c),
            of_.affine ? weight_.get(c) : 1,
            of_.affine ? bias_.get(c) : 0,
            half_unit(sums_of(of_.dtype)),
            kSlope,
            problem_.activation};
  }
  Exact residual(size_t i) const { return of_.residual ? residual_.get(i) : 0; }
  Bounded to_stored(const Bounded& x) const {
    return rounded_to(stored(of_.dtype), sums_of(of_.dtype), x);
  }

  void forward(bool check, std::vector<Memory>& kept) {
    Memory moments = channels(2), statistics = channels(2), output = values(), again = values();
    Memory mean = running_[0].copy(), var = running_[1].copy();
    cuda_kernels.moments(problem_, moments.at(), nullptr);
    cuda_kernels.forward(problem_, kEps, {mean.at(), var.at(), kMomentum}, statistics.at(),
                         output.at(), nullptr);
    cuda_kernels.normalize(problem_, statistics.at(), again.at(), nullptr);
    const int64_t at = first_difference(output, again);
    if (at >= 0) fail("batch norm: output %lld is not the same again", static_cast<long long>(at));
    if (check) check_forward(moments, statistics, mean, var, output);
    statistics_ = statistics.copy();
    for (Memory* memory : {&moments, &statistics, &mean, &var, &output}) {
      kept.push_back(std::move(*memory));
    }
  }

  void running(bool check, std::vector<Memory>& kept) {
    Memory statistics = channels(2), var = running_[1].copy();
    for (int64_t c = 0; c < of_.channels; ++c) var.set(c, std::fabs(var.get(c)));
    cuda_kernels.running(problem_, kEps, {running_[0].at(), var.at(), 0}, statistics.at(), nullptr);
    const Exact u = half_unit(sums_of(of_.dtype));
    for (int64_t c = 0; check && c < of_.channels; ++c) {
      const Exact invstd = 1 / std::sqrt(var.get(c) + static_cast<Exact>(kEps));
      expect_near(statistics.get(c), {running_[0].get(c), 0}, "running mean", c);
      expect_near(statistics.get(of_.channels + c), {invstd, 4 * u * invstd}, "running invstd", c);
    }
    kept.push_back(std::move(statistics));
  }

  void check_forward(const Memory& moments, const Memory& statistics, const Memory& mean,
                     const Memory& var, const Memory& output) const {
    const Exact u = half_unit(sums_of(of_.dtype)), n = problem_.count();
    for (int64_t c = 0; c < of_.channels; ++c) {
      const ExactMoments exact = moments_of(problem_, input_, c);
      const Exact m2 = exact.m2.value, invstd = 1 / std::sqrt(m2 / n + kEps);
      expect_near(moments.get(c), exact.mean, "mean", c);
      expect_near(moments.get(of_.channels + c), {m2, exact.m2.bound + u * m2}, "m2", c);
      expect_near(statistics.get(c), exact.mean, "mean of statistics", c);
      const Exact relative = exact.m2.bound / (m2 + n * kEps) / 2 + 2 * u;
      expect_near(statistics.get(of_.channels + c), {invstd, invstd * relative}, "invstd", c);
      const auto running = [&](const Memory& before, Bounded batch) -> Bounded {
        const Exact value = (1 - kMomentum) * before.get(c) + kMomentum * batch.value;
        return {value, kMomentum * batch.bound + 2 * u * std::fabs(value)};
      };
      expect_near(mean.get(c), running(running_[0], exact.mean), "running mean", c);
      const Bounded unbiased = {m2 / (n - 1), exact.m2.bound / (n - 1)};
      expect_near(var.get(c), running(running_[1], unbiased), "running variance", c);
      check_output(statistics, output, c);
    }
  }

  void check_output(const Memory& statistics, const Memory& output, int64_t c) const {
    const Channel channel(problem_, c);
    const ExactAffine exact = affine(statistics, c);
    for (int64_t i = 0; i < channel.count(); ++i) {
      const size_t at = channel.at(i);
      expect_near(output.get(at), to_stored(exact.output(input_.get(at), residual(at))), "output",
                  at);
    }
  }

  void backward(bool training, bool check, std::vector<Memory>& kept) {
    // Which are wanted: all, then each in turn not, and each alone.
    for (const int wanted : {15, 14, 13, 11, 7, 1, 2, 4, 8}) {
      if (wanted != 15 && problem_.count() * of_.channels > 2500) continue;
      Memory input = wanted & 1 ? values() : Memory();
      Memory residual = wanted & 2 && of_.residual ? values() : Memory();
      Memory weight = wanted & 4 ? channels(1) : Memory(),
             bias = wanted & 8 ? channels(1) : Memory();
      cuda_kernels.backward(problem_, statistics_.at(), training, grad_.at(), input.at(),
                            residual.at(), weight.at(), bias.at(), nullptr);
      if (check) check_backward(training, nullptr, input, residual, weight, bias);
      for (Memory* memory : {&input, &residual, &weight, &bias}) {
        if (memory->at() != nullptr) kept.push_back(std::move(*memory));
      }
    }
  }

  void parts(bool check, std::vector<Memory>& kept) {
    Memory sums = channels(2), input = values(), residual = of_.residual ? values() : Memory();
    cuda_kernels.backward_sums(problem_, statistics_.at(), grad_.at(), sums.at(), nullptr);
    Memory means = channels(2);
    for (int64_t i = 0; i < 2 * of_.channels; ++i) means.set(i, sums.get(i) / problem_.count() / 2);
    cuda_kernels.backward_input(problem_, statistics_.at(), means.at(), grad_.at(), input.at(),
                                residual.at(), nullptr);
    if (check) {
      check_backward(true, &means, input, residual, Memory(), Memory());
      for (int64_t c = 0; c < of_.channels; ++c) {
        Bounded sum, dot;
        sums_of_gradients(c, sum, dot);
        expect_near(sums.get(c), sum, "sum", c);
        expect_near(sums.get(of_.channels + c), dot, "dot", c);
      }
    }
    kept.push_back(std::move(sums));
    kept.push_back(std::move(input));
    if (of_.residual) kept.push_back(std::move(residual));
  }

  // Over the gradient of z, and over its product with the normalised input.
  void sums_of_gradients(int64_t c, Bounded& sum, Bounded& dot) const {
    const Channel channel(problem_, c);
    const ExactAffine exact = affine(statistics_, c);
    const Exact added = exact.u * (terms(problem_) + 4);
    for (int64_t i = 0; i < channel.count(); ++i) {
      const size_t at = channel.at(i);
      const Exact x = input_.get(at), normalized = (x - exact.mean) * exact.invstd;
      const Bounded of_z = exact.gradient(grad_.get(at), x, residual(at));
      sum.value += of_z.value;
      sum.bound += added * std::fabs(of_z.value) + of_z.bound;
      dot.value += of_z.value * normalized;
      dot.bound += (added * std::fabs(of_z.value) + of_z.bound) * std::fabs(normalized);
    }
  }

  // means: as given, or those of this channel.
  void check_backward(bool training, const Memory* means, const Memory& input,
                      const Memory& residual, const Memory& weight, const Memory& bias) const {
    const Exact n = problem_.count();
    for (int64_t c = 0; c < of_.channels; ++c) {
      const ExactAffine exact = affine(statistics_, c);
      Bounded sum, dot;
      sums_of_gradients(c, sum, dot);
      if (weight.at() != nullptr) expect_near(weight.get(c), dot, "gradient of weight", c);
      if (bias.at() != nullptr) expect_near(bias.get(c), sum, "gradient of bias", c);
      Bounded of_grad = {sum.value / n, sum.bound / n}, of_dot = {dot.value / n, dot.bound / n};
      if (!training) of_grad = of_dot = {};
      if (means != nullptr)
        of_grad = {means->get(c), 0}, of_dot = {means->get(of_.channels + c), 0};
      check_gradients(c, exact, of_grad, of_dot, input, residual);
    }
  }

  void check_gradients(int64_t c, const ExactAffine& exact, const Bounded& of_grad,
                       const Bounded& of_dot, const Memory& input, const Memory& residual) const {
    const Channel channel(problem_, c);
    const Exact scale = exact.weight * exact.invstd;
    for (int64_t i = 0; i < channel.count(); ++i) {
      const size_t at = channel.at(i);
      const Exact x = input_.get(at), normalized = (x - exact.mean) * exact.invstd;
      const Bounded of_z = exact.gradient(grad_.get(at), x, this->residual(at));
      if (residual.at() != nullptr) {
        expect_near(residual.get(at), to_stored(of_z), "gradient of residual", at);
      }
      if (input.at() == nullptr) continue;
      const Exact product = normalized * of_dot.value;
      const Exact magnitude = std::fabs(of_z.value) + std::fabs(of_grad.value) + std::fabs(product);
      const Exact bound = 6 * exact.u * magnitude + of_z.bound + of_grad.bound +
                          std::fabs(normalized) * of_dot.bound;
      const Bounded expected = {scale * (of_z.value - of_grad.value - product),
                                std::fabs(scale) * bound};
      expect_near(input.get(at), to_stored(expected), "gradient of input", at);
    }
  }

  Case of_;
  Generator generator_;
  Problem problem_{};
  Memory input_, grad_, residual_, weight_, bias_, running_[2], workspace_, statistics_;
};

}  // namespace emulation
