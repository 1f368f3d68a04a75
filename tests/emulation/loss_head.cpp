// Both kernels of the loss head beside their definition, and beside themselves in other orders of
// threads: the same bits.
#include <limits>

#include "driver.h"
#include "loss_head/kernels.h"

namespace emulation {
namespace {

using memsave_ext::loss_head::Chunk;
using memsave_ext::loss_head::cuda_kernels;
using memsave_ext::vector::DType;

constexpr double kNone = -std::numeric_limits<double>::infinity();

struct Case {
  DType dtype;
  int64_t tokens, classes;
  bool caps, probabilities, smooth, weighted, entropy;
  size_t offset = 0;  // of the logits' first, in elements, from what is aligned
};

Stored stored(DType dtype) {
  constexpr Stored of[] = {Stored::kDouble, Stored::kFloat, Stored::kHalf, Stored::kBFloat16};
  return of[static_cast<int>(dtype)];
}

// A problem, and what the kernels have to make of it.
class Problem {
 public:
  explicit Problem(const Case& of)
      : of_(of),
        wide_(of.dtype == DType::kDouble ? Stored::kDouble : Stored::kFloat),
        logits_(stored(of.dtype), count(), of.offset),
        probabilities_(wide_, of.probabilities ? count() : 0),
        weight_(wide_, of.weighted ? of.classes : 0),
        coefficients_(wide_, (4 + of.entropy) * of.tokens),
        target_(of.tokens) {
    Generator generator(of.classes);
    for (size_t i = 0; i < count(); ++i) {
      logits_.set(i, i % 37 == 5 ? kNone : 3 * normal(generator));
      if (of.probabilities) probabilities_.set(i, i % 37 == 5 ? 0 : std::fabs(normal(generator)));
    }
    for (size_t i = 0; i < weight_.count(); ++i) weight_.set(i, 1 + 0.5 * std::sin(i));
    for (size_t i = 0; i < coefficients_.count(); ++i) {
      // The last token is ignored.
      const bool ignored = i % of.tokens == static_cast<size_t>(of.tokens - 1) && of.tokens > 1;
      // That of the entropy is small, so that no gradient is more than half has.
      const double scale = i < static_cast<size_t>(4 * of.tokens) ? 1 : 0.1;
      coefficients_.set(i, ignored ? 0 : scale * (1 + 0.3 * normal(generator)));
    }
    for (int64_t t = 0; t < of.tokens; ++t) target_[t] = kFirst + 7 * t % (of.classes + 2) - 1;
  }

  Chunk chunk(const Memory& logits) const {
    Chunk chunk{};
    chunk.dtype = of_.dtype;
    chunk.tokens = of_.tokens;
    chunk.classes = of_.classes;
    chunk.first = kFirst;
    chunk.logits = logits.at();
    if (of_.probabilities) {
      chunk.probabilities = probabilities_.at();
    } else {
      chunk.target = target_.data();
    }
    if (of_.weighted) chunk.class_weight = weight_.at();
    chunk.keep = keep();
    chunk.spread = spread();
    chunk.softcap = of_.caps ? kCap : 0;
    chunk.entropy = of_.entropy;
    return chunk;
  }

  Memory reduced() const {
    Memory sums(wide_, (3 + of_.entropy) * of_.tokens);
    for (size_t i = 0; i < sums.count(); ++i) {
      sums.set(i, i >= static_cast<size_t>(of_.tokens) ? 1 : i % 2 == 0 ? kNone : 1.5);
    }
    cuda_kernels.reduce(chunk(logits_), sums.at(), nullptr);
    return sums;
  }

  Memory gradient() const {
    Memory logits = logits_.copy();
    cuda_kernels.gradient(chunk(logits), coefficients_.at(), nullptr);
    return logits;
  }

  void check(const Memory& sums, const Memory& gradient) const {
    for (int64_t t = 0; t < of_.tokens; ++t) {
      double maximum = t % 2 == 0 ? kNone : 1.5, dot = 1;
      for (int64_t c = 0; c < of_.classes; ++c) maximum = std::fmax(maximum, capped(t, c));
      const double base = maximum == kNone ? 0 : maximum;
      // The sum of the exponentials before is 1 and so is that of their products with distances.
      const double before = t % 2 == 0 ? 0 : std::exp(1.5 - base);
      double sum = before, moment = before == 0 ? 0 : before * (1 + 1.5 - base);
      for (int64_t c = 0; c < of_.classes; ++c) {
        sum += std::exp(capped(t, c) - base);
        moment += product(capped(t, c) - base);
        if (a(t, c) != 0 || mixes()) dot += a(t, c) * capped(t, c);
        expect("gradient", gradient.get(t * of_.classes + c), gradient_at(t, c), stored(of_.dtype));
      }
      expect("maximum", sums.get(t), maximum, wide_);
      expect("sum", sums.get(of_.tokens + t), sum, wide_);
      expect("dot", sums.get(2 * of_.tokens + t), dot, wide_);
      if (of_.entropy) expect("moment", sums.get(3 * of_.tokens + t), moment, wide_);
    }
  }

 private:
  static constexpr int64_t kFirst = 512;
  static constexpr double kCap = 5;

  size_t count() const { return static_cast<size_t>(of_.tokens * of_.classes); }
  double keep() const { return of_.smooth ? 0.9 : 1; }
  double spread() const { return of_.smooth ? 0.01 : 0; }
  bool mixes() const { return of_.probabilities || of_.smooth; }

  double capped(int64_t t, int64_t c) const {
    const double logit = logits_.get(t * of_.classes + c);
    return of_.caps ? kCap * std::tanh(logit / kCap) : logit;
  }

  double a(int64_t t, int64_t c) const {
    const double part =
        of_.probabilities ? probabilities_.get(t * of_.classes + c) : target_[t] == kFirst + c;
    return (keep() * part + spread()) * (of_.weighted ? weight_.get(c) : 1);
  }

  // exp(distance) * distance.
  static double product(double distance) {
    return distance == kNone ? 0 : std::exp(distance) * distance;
  }

  double gradient_at(int64_t t, int64_t c) const {
    const auto of = [&](int64_t row) { return coefficients_.get(row * of_.tokens + t); };
    const double of_entropy = of_.entropy ? of(4) : 0;
    if (of(2) == 0 && of(3) == 0 && of_entropy == 0) return 0;
    const double logit = capped(t, c), distance = logit - of(0) - of(1);
    const double gradient =
        of(2) * std::exp(distance) + of_entropy * product(distance) - of(3) * a(t, c);
    return of_.caps ? gradient * (1 - logit / kCap * (logit / kCap)) : gradient;
  }

  void expect(const char* what, double found, double right, Stored type) const {
    ++checks;
    if (found == right || (std::isnan(found) && std::isnan(right))) return;
    const double unit = type == Stored::kDouble  ? 0x1p-52
                        : type == Stored::kFloat ? 0x1p-23
                        : type == Stored::kHalf  ? 0x1p-10
                                                 : 0x1p-7;
    // Sums of a few thousand terms; half has no smaller numbers than 2^-24.
    const double allowed = unit * (4 + 64 * (type <= Stored::kFloat)) * (std::fabs(right) + 1) +
                           (type == Stored::kHalf ? 0x1p-24 : 0);
    if (!(std::fabs(found - right) <= allowed)) {
      fail("loss head, type %d, %lld tokens, %lld classes: %s is %.17g, not %.17g",
           static_cast<int>(of_.dtype), static_cast<long long>(of_.tokens),
           static_cast<long long>(of_.classes), what, found, right);
    }
  }

  Case of_;
  Stored wide_;
  Memory logits_, probabilities_, weight_, coefficients_;
  std::vector<int64_t> target_;
};

void run(const Case& of, const std::vector<Order>& orders) {
  const Problem problem(of);
  Memory sums, gradient;
  for (const Order order : orders) {
    use(order, of.classes);
    Memory new_sums = problem.reduced(), new_gradient = problem.gradient();
    if (order == orders[0]) {
      problem.check(new_sums, new_gradient);
      sums = std::move(new_sums);
      gradient = std::move(new_gradient);
    } else if (first_difference(sums, new_sums) >= 0 ||
               first_difference(gradient, new_gradient) >= 0) {
      fail("loss head: other bits in another order");
    }
  }
}

}  // namespace
}  // namespace emulation

int main(int argc, char** argv) {
  using namespace emulation;
  const Options options = options_of(argc, argv);
  for (int dtype = 0; dtype < 4; ++dtype) {
    const auto run_all = [&](int variant, std::vector<std::pair<int64_t, int64_t>> sizes,
                             size_t offset) {
      for (const auto& [tokens, classes] : sizes) {
        run({static_cast<DType>(dtype), tokens, classes, (variant & 1) != 0, (variant & 2) != 0,
             (variant & 4) != 0, (variant & 8) != 0, (variant & 16) != 0, offset},
            options.orders);
      }
    };
    for (int variant = 0; variant < 32; ++variant) {
      run_all(variant, {{1, 1}, {3, 40}, {4, 257}}, variant % 3);
      run_all(variant, {{9, 19}, {2, 1100}}, 0);
    }
    // Every place at which a row can begin, and rows that a block reduces.
    for (const int variant : {0, 15, 16}) {
      for (size_t offset = 0; offset < 8; ++offset) run_all(variant, {{2, 5}, {1, 24}}, offset);
      run_all(variant, {{2, 4352}, {2, 4359}}, variant % 7);
    }
    if (options.large) {
      run({static_cast<DType>(dtype), 300, 8192, true, false, true, true, true}, options.orders);
    }
  }
  finish(options, "loss head");
}
