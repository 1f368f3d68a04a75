// Steps on CPUs: the elements of all items form one range, which is divided among threads.
#include <ATen/Parallel.h>

#include "adam/arithmetic.h"
#include "adam/cpu/loops.h"
#include "adam/cpu/measure.h"

namespace memsave_ext::adam {

const cpu::Loops& cpu::loops() {
  static const Loops& chosen = MEMSAVE_EXT_TABLE_OF_THIS_CPU(kLoops);
  return chosen;
}

namespace {

constexpr int64_t kGrain = 32768;  // elements; fewer are not worth a thread

Coefficients<double> coefficients_of(const Options& o, double lr, double step, double factor) {
  if (is_sgd(o.rule)) return coefficients<Rule::kMomentum>(o, lr, step, {}, factor);
  if (o.rule == Rule::kLion) return coefficients<Rule::kLion>(o, lr, step, {}, factor);
  return coefficients<Rule::kAdam>(o, lr, step, powers(o, step), factor);
}

// Caches the coefficients of the last few items, which alternate between parameter groups.
class RecentCoefficients {
 public:
  const Coefficients<double>& of(const Item& item) {
    const double lr = item.device_lr != nullptr ? *item.device_lr : item.options->lr;
    const Key key = {item.options, lr, item.step, item.factor != nullptr ? *item.factor : 1};
    for (const Entry& entry : entries_) {
      if (entry.key == key) return entry.values;
    }
    Entry& entry = entries_[next_++ % kEntries];
    entry = {key, coefficients_of(*key.options, key.lr, key.step, key.factor)};
    return entry.values;
  }

 private:
  static constexpr unsigned kEntries = 4;

  struct Key {
    const Options* options = nullptr;
    double lr;
    double step;
    double factor;

    bool operator==(const Key& other) const {
      return options == other.options && lr == other.lr && step == other.step &&
             factor == other.factor;
    }
  };

  struct Entry {
    Key key;
    Coefficients<double> values;
  };

  Entry entries_[kEntries];
  unsigned next_ = 0;
};

// Returns where the border of two threads' ranges cuts an item: a multiple of kBlock, or its end.
// So blocks of states stay whole, and threads do not write to the same cache line.
int64_t cut(const Item& item, int64_t border) {
  if (border >= item.numel) return item.numel;
  return border > 0 ? border / kBlock * kBlock : 0;
}

// Steps the elements from begin to end, counted over all items in a row.
void step_range(const Item* item, int64_t begin, int64_t end) {
  RecentCoefficients coefficients;
  for (int64_t start = 0; start < end; start += item->numel, ++item) {
    const int64_t from = cut(*item, begin - start), to = cut(*item, end - start);
    if (from >= to || (item->skip != nullptr && *item->skip != 0)) continue;
    cpu::loops().steps[item->combination()](*item, from, to, coefficients.of(*item));
  }
}

void step_kernel(const Item* items, int64_t count, void*) {
  int64_t elements = 0;
  for (int64_t i = 0; i < count; ++i) elements += items[i].numel;
  at::parallel_for(0, elements, kGrain,
                   [&](int64_t begin, int64_t end) { step_range(items, begin, end); });
}

}  // namespace

const Kernels cpu_kernels = {step_kernel, nullptr, cpu::measure, cpu::measure_workspace};

}  // namespace memsave_ext::adam
