// Steps on CPUs: all elements of all items are one range, which threads share.
#include <ATen/Parallel.h>
#include <ATen/Version.h>

#include <string>

#include "adam/cpu_steps.h"

namespace memsave_ext::adam {
namespace {

using cpu::Step;
using cpu::StepTable;

constexpr int64_t kGrain = 32768;  // elements worth a thread
constexpr int64_t kUnit = 64;      // elements: threads do not write to the same cache line

// As torch chose, so that ATEN_CPU_CAPABILITY limits both.
const StepTable& step_table() {
#if defined(__x86_64__)
  const std::string capability = at::get_cpu_capability();
  if (capability == "AVX512") return cpu::avx512_steps;
  if (capability == "AVX2") return cpu::avx2_steps;
#endif
  return cpu::baseline_steps;
}

Step step_of(const Item& item) {
  static const StepTable& table = step_table();
  const bool float_states = item.state_type == DType::kFloat;
  return table[static_cast<int>(item.param_type)][float_states][item.max_exp_avg_sq != nullptr];
}

// Of the last few options and steps: items alternate between parameter groups.
class RecentCoefficients {
 public:
  const Coefficients<double>& of(const Item& item) {
    for (const Entry& entry : entries_) {
      if (entry.options == item.options && entry.step == item.step) return entry.values;
    }
    Entry& entry = entries_[next_++ % kEntries];
    const Options& options = *item.options;
    entry = {&options, item.step, coefficients(options, options.lr, powers(options, item.step))};
    return entry.values;
  }

 private:
  static constexpr unsigned kEntries = 4;

  struct Entry {
    const Options* options = nullptr;
    double step;
    Coefficients<double> values;
  };

  Entry entries_[kEntries];
  unsigned next_ = 0;
};

// Where an item is cut that the border of two ranges falls into, or 0 or all of it.
int64_t cut(const Item& item, int64_t border) {
  if (border >= item.numel) return item.numel;
  return border > 0 ? border / kUnit * kUnit : 0;
}

// The elements from begin to end of all items in a row.
void step_range(const Item* item, int64_t begin, int64_t end) {
  RecentCoefficients coefficients;
  for (int64_t start = 0; start < end; start += item->numel, ++item) {
    const int64_t from = cut(*item, begin - start), to = cut(*item, end - start);
    if (from < to) step_of (*item)(*item, from, to, coefficients.of(*item));
  }
}

void step_kernel(const Item* items, int64_t count, void*) {
  int64_t elements = 0;
  for (int64_t i = 0; i < count; ++i) elements += items[i].numel;
  at::parallel_for(0, elements, kGrain,
                   [&](int64_t begin, int64_t end) { step_range(items, begin, end); });
}

}  // namespace

const Kernels cpu_kernels = {step_kernel, nullptr};

}  // namespace memsave_ext::adam
