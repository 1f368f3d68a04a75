// Sums of squares and counts of steps.
#include "adam_tensors.h"
#include "reference/reference.h"

namespace emulation {
namespace {

using memsave_ext::adam::cuda_kernels;
using memsave_ext::adam::Measure;

// Results of one measurement.
struct Results {
  std::vector<double> squares, factors;
  std::vector<float> skips;
  float found_inf = 0;

  explicit Results(size_t count) : squares(count, -1), factors(count, -1), skips(count, -1) {}
};

Results measure(const memsave_ext::adam::Kernels& kernels, const std::vector<Item>& items,
                double max_norm) {
  const auto count = static_cast<int64_t>(items.size());
  Results results(items.size());
  const float grad_scale = 8;
  const Measure to = {
      &grad_scale,          max_norm,          results.squares.data(), results.factors.data(),
      results.skips.data(), &results.found_inf};
  const Memory workspace(Stored::kBits8, kernels.measure_workspace(items.data(), count));
  kernels.measure(items.data(), count, to, workspace.at(), nullptr);
#ifdef EMULATION_MEMORY
  __msan_unpoison(results.squares.data(), 8 * items.size());
  __msan_unpoison(results.factors.data(), 8 * items.size());
  __msan_unpoison(results.skips.data(), 4 * items.size());
  __msan_unpoison(&results.found_inf, sizeof(results.found_inf));
#endif
  return results;
}

// Both sums have `terms` roundings at most of a double, of terms that all are positive.
bool close(double a, double b, size_t terms) {
  if (std::isnan(a) || std::isnan(b) || std::isinf(a) || std::isinf(b)) {
    return a == b || (std::isnan(a) && std::isnan(b));
  }
  return std::fabs(a - b) <= 0x1p-52 * static_cast<double>(terms + 8) * std::fabs(a);
}

void compare(DType type, const std::vector<size_t>& sizes, bool finite) {
  Generator generator(sizes.size());
  const Format format = {type, ParamFormat::kPlain, StateFormat::kAsParam,
                         memsave_ext::adam::Rule::kAdam};
  std::vector<Tensor> tensors;
  for (size_t i = 0; i < sizes.size(); ++i) {
    tensors.emplace_back(format, sizes[i], i % 2, kOperands, generator, finite);
  }
  std::vector<Item> items;
  for (const Tensor& tensor : tensors) items.push_back(tensor.item(true));
  for (const double max_norm : {0.0, 0.01}) {
    const Results cpu = measure(adam_on_cpu(), items, max_norm);
    const Results device = measure(cuda_kernels, items, max_norm);
    for (size_t i = 0; i < items.size(); ++i) {
      if (!close(device.squares[i], cpu.squares[i], sizes[i]) ||
          !close(device.factors[i], cpu.factors[i], sizes[i]) || device.skips[i] != cpu.skips[i] ||
          device.found_inf != cpu.found_inf) {
        fail(
            "adam, measure: type %d, gradient %zu of %zu elements: %.17g, %.17g, %g, on the CPU "
            "%.17g, %.17g, %g",
            static_cast<int>(type), i, sizes[i], device.squares[i], device.factors[i],
            device.skips[i], cpu.squares[i], cpu.factors[i], cpu.skips[i]);
      }
      checks += 4;
    }
  }
}

// Squares of finite values can be too large for a double: that is no reason to skip a step.
void measure_large_values() {
  Memory grad(Stored::kDouble, 300);
  for (size_t i = 0; i < 300; ++i) grad.set(i, i == 17 ? 1e200 : 1);
  Item item = {};
  item.grad = grad.at();
  item.numel = 300;
  item.param_type = DType::kDouble;
  const Results results = measure(cuda_kernels, {item}, 0);
  if (!std::isinf(results.squares[0]) || results.skips[0] != 0 || results.found_inf != 0) {
    fail("adam, measure: large values: %g, %g", results.squares[0], results.skips[0]);
  }
  checks += 3;
}

// Gradients whose squares are too large or too small for floats, or are so in a few places, and
// zeros.
void measure_scales() {
  constexpr size_t kSizes[] = {4096, 16'384, 40'000};
  for (const float scale :
       {0x1p-149f, 0x1p-80f, 0x1p-50f, 0x1p-40f, 1.f, 0x1p50f, 0x1p63f, 0x1p80f}) {
    for (const size_t size : kSizes) {
      for (const size_t period : {size_t{1}, size_t{5}, size_t{3000}, size}) {
        for (const float other : {0.f, 1.f}) {
          Memory grad(Stored::kFloat, size);
          long double expected = 0;
          for (size_t i = 0; i < size; ++i) {
            const bool scaled = i % period == period / 2;
            const auto noise = 1 + static_cast<float>(i * 2654435761u % 16'777'216) * 0x1p-24f;
            const float value = (i % 2 == 0 ? 1 : -1) * noise * (scaled ? scale : other);
            grad.set(i, value);
            expected += static_cast<long double>(value) * value;
          }
          Item item = {};
          item.grad = grad.at();
          item.numel = static_cast<int64_t>(size);
          item.param_type = DType::kFloat;
          const Results results = measure(cuda_kernels, {item}, 0);
          if (!close(results.squares[0], static_cast<double>(expected), size) ||
              results.skips[0] != 0) {
            fail(
                "adam, measure: %zu elements, each %zu-th of about %g, others %g: %.17g, not %.17g",
                size, period, scale, other, results.squares[0], static_cast<double>(expected));
          }
          checks += 2;
        }
      }
    }
  }
}

void advance() {
  for (const size_t count : {0, 1, 250, 251, 600}) {
    for (const bool with_skips : {false, true}) {
      std::vector<float> steps(count, 3), skips(count);
      std::vector<float*> places(count);
      std::vector<const float*> given(count);
      for (size_t i = 0; i < count; ++i) {
        skips[i] = i % 3 == 0 ? 1 : 0;
        places[i] = &steps[i];
        given[i] = i % 5 == 0 ? nullptr : &skips[i];
      }
      cuda_kernels.advance(places.data(), with_skips ? given.data() : nullptr,
                           static_cast<int64_t>(count), nullptr);
      for (size_t i = 0; i < count; ++i) {
        const bool skipped = with_skips && given[i] != nullptr && skips[i] != 0;
        if (steps[i] != (skipped ? 3 : 4)) fail("adam, advance: step %zu is %g", i, steps[i]);
        ++checks;
      }
    }
  }
}

}  // namespace

void run_measures(bool large) {
  for (int type = 0; type < 4; ++type) {
    std::vector<size_t> sizes = {0, 1, 3, 31, 257, 1023, 4097, 16383, 16384, 16385, 40'000};
    for (const bool finite : {true, false}) compare(static_cast<DType>(type), sizes, finite);
    std::vector<size_t> many;
    for (size_t i = 0; i < 170; ++i) many.push_back(i % 40);
    if (large) many.push_back(1'000'003);
    compare(static_cast<DType>(type), many, true);
  }
  measure_large_values();
  measure_scales();
  advance();
}

}  // namespace emulation
