#include "adam/cpu/measure.h"

#include <ATen/Parallel.h>

#include <algorithm>
#include <cmath>

#include "adam/cpu/loops.h"

namespace memsave_ext::adam::cpu {
namespace {

// Each chunk has its own sum, and a gradient's are added in order: the result does not depend on
// the number of threads.
constexpr int64_t kChunk = 8192;  // elements
constexpr int64_t kGrain = 4;     // chunks; fewer are not worth a thread

int64_t chunks_of(const Item& item) { return (item.numel + kChunk - 1) / kChunk; }

double sum_chunk(const Item& item, int64_t chunk) {
  const int64_t begin = chunk * kChunk;
  const auto* const grad = static_cast<const char*>(item.grad);
  return loops().sum_squares[static_cast<int>(item.param_type)](
      grad + begin * item_size(item.param_type), std::min(kChunk, item.numel - begin));
}

// Sums the chunks from begin to end, counted over all items in a row.
void sum_chunks(const Item* item, int64_t begin, int64_t end, double* sums) {
  for (int64_t first = 0; first < end; first += chunks_of(*item), ++item) {
    const int64_t to = std::min(end - first, chunks_of(*item));
    for (int64_t i = std::max<int64_t>(begin - first, 0); i < to; ++i) {
      sums[first + i] = sum_chunk(*item, i);
    }
  }
}

// Whether all values are, of which the sum of squares is this; that of large doubles is not.
bool is_finite(const Item& item, double square) {
  if (std::isfinite(square) || item.param_type != DType::kDouble) return std::isfinite(square);
  const auto* const grad = static_cast<const double*>(item.grad);
  return std::all_of(grad, grad + item.numel, [](double value) { return std::isfinite(value); });
}

void conclude(const Measure& measure, int64_t item, double square, bool finite) {
  const double scale = measure.grad_scale != nullptr ? *measure.grad_scale : 1;
  double factor = 1 / scale;
  if (measure.max_norm != 0) factor *= clip_factor(std::sqrt(square) / scale, measure.max_norm);
  if (measure.squares != nullptr) measure.squares[item] = square;
  if (measure.factors != nullptr) measure.factors[item] = factor;
  if (measure.skips != nullptr) measure.skips[item] = finite ? 0 : 1;
  if (measure.found_inf != nullptr && !finite) *measure.found_inf = 1;
}

}  // namespace

void measure(const Item* items, int64_t count, const Measure& measure, void* workspace, void*) {
  const int64_t chunks = measure_workspace(items, count) / static_cast<int64_t>(sizeof(double));
  auto* sums = static_cast<double*>(workspace);
  at::parallel_for(0, chunks, kGrain,
                   [&](int64_t begin, int64_t end) { sum_chunks(items, begin, end, sums); });
  for (int64_t i = 0; i < count; ++i) {
    double square = 0;
    for (int64_t chunk = 0; chunk < chunks_of(items[i]); ++chunk) square += *sums++;
    conclude(measure, i, square, is_finite(items[i], square));
  }
}

int64_t measure_workspace(const Item* items, int64_t count) {
  int64_t chunks = 0;
  for (int64_t i = 0; i < count; ++i) chunks += chunks_of(items[i]);
  return chunks * static_cast<int64_t>(sizeof(double));
}

}  // namespace memsave_ext::adam::cpu
