// Every step of the CUDA sources beside the CPU's, bit for bit.
#include <cstdio>

#include "adam_tensors.h"
#include "reference/reference.h"
#include "report/probe.h"

namespace emulation {
namespace {

using memsave_ext::adam::cuda_kernels;

// What steps differ in besides the format.
struct Variant {
  memsave_ext::adam::Options options;
  double factor;
  float skip;
  bool with_factor, with_skip, on_device;  // on_device: the count of steps and the learning rate
};

constexpr float kLr = 0.01f;
const Variant kVariants[] = {
    {{kLr, 0.9, 0.999, 1e-8, 0, false, false, false, {}, 7}, 1, 0, false, false, false},
    {{kLr, 0.9, 0.999, 1e-8, 0.1, true, false, false, {}, ~uint64_t{0}},
     0.5,
     0,
     true,
     false,
     false},
    {{kLr, 0.9, 0.99, 1e-6, 0.1, false, false, true, {}, 9}, 1, 0, false, true, true},
    {{kLr, 0.0, 0.999, 1e-8, 0, true, false, false, {}, 3}, 1, 1, false, true, false},
    {{kLr, 0.4, 0.9, 1e-8, 0.01, true, true, true, {}, 4}, 2, 0, true, true, true},
    {{kLr, 0.95, 0.95, 1e-8, 0, false, true, false, {}, 5}, 1, 0, false, false, true},
    {{kLr, 0.9, 0.999, 1e-3, 0, false, false, false, {}, 6}, 0.25, 0, true, false, false},
};

// Tensors of one format, each with its own variant, position and count of steps.
class Steps {
 public:
  Steps(const Format& format, uint64_t seed, bool finite)
      : format_(format), generator_(seed), finite_(finite) {}

  void add(size_t numel, int variant, int offset = 0, Operand shifted = kOperands) {
    tensors_.emplace_back(format_, numel, offset, shifted, generator_, finite_);
    variants_.push_back(kVariants[variant]);
    variants_.back().options.rule = format_.rule;
  }

  void step(const char* what) {
    ++step_;
    const auto count = static_cast<float>(step_);
    for (const bool on_device : {false, true}) {
      std::vector<Item> items;
      for (size_t i = 0; i < tensors_.size(); ++i) {
        const Variant& variant = variants_[i];
        Item item = tensors_[i].item(on_device);
        item.position = static_cast<uint32_t>(3 * i);
        item.step = step_;
        if (on_device && variant.on_device) {
          item.device_step = &count;
          item.device_lr = &kLr;
        }
        if (variant.with_factor) item.factor = &variant.factor;
        if (variant.with_skip) item.skip = &variant.skip;
        item.options = &variant.options;
        items.push_back(item);
      }
      const auto& kernels = on_device ? cuda_kernels : adam_on_cpu();
      kernels.step(items.data(), static_cast<int64_t>(items.size()), nullptr);
    }
    for (const Tensor& tensor : tensors_) tensor.compare(what);
  }

 private:
  Format format_;
  Generator generator_;
  bool finite_;
  std::vector<Tensor> tensors_;
  std::vector<Variant> variants_;
  int step_ = 0;
};

constexpr int kVariantCount = sizeof(kVariants) / sizeof(kVariants[0]);

// Sizes around the borders of vectors, warps, blocks of states and chunks; each operand by itself
// at an address that no vector may be loaded from, then all.
void add_sizes(Steps& steps, const Format& format) {
  for (const size_t numel : {0, 1, 7, 8, 31, 33, 255, 256, 257, 2047, 2048, 2049}) {
    for (int operand = 0; operand <= kOperands; ++operand) {
      const auto shifted = static_cast<Operand>(operand);
      if (operand < kOperands && !has(format, shifted)) continue;
      if (numel > 300 && operand % 2 == 1) continue;
      steps.add(numel, (operand + static_cast<int>(numel)) % 2, 1, shifted);
    }
    steps.add(numel, 0);
  }
}

void run_format(const Format& format, bool large) {
  Steps sizes(format, 1, false);
  add_sizes(sizes, format);
  sizes.step("sizes");
  sizes.step("sizes, second step");
  Steps variants(format, 2, true);
  for (int i = 0; i < 3 * kVariantCount; ++i) variants.add(100 + 300 * i, i % kVariantCount);
  for (int i = 0; i < 111; ++i) variants.add(1 + i % 50, i / 30);
  variants.step("variants");
  if (!large) return;
  Steps many(format, 3, true);
  for (const size_t numel : {65535, 65536, 65537, 200'000}) many.add(numel, 0, numel % 2);
  many.step("chunks");
  Steps longest(format, 4, true);
  longest.add(5'000'001, 1);
  longest.step("long chunks");
}

// Of a part, each combination in one of the orders.
void run_all(const Options& options, size_t order) {
  using memsave_ext::adam::Combination;
  size_t number = 0;
  for (int i = 0; i < memsave_ext::adam::kCombinations; ++i) {
    const Combination combination = Combination::at(i);
    if (!combination.exists()) continue;
    if (options.part && number++ % options.orders.size() != order) continue;
    const Format format = {combination.param, combination.format, combination.states,
                           combination.rule};
    run_format(format, options.large);
  }
}

}  // namespace

void run_measures(bool large);
void run_codes();

}  // namespace emulation

int main(int argc, char** argv) {
  const emulation::Options options = emulation::options_of(argc, argv);
  for (size_t i = 0; i < options.orders.size(); ++i) {
    emulation::use(options.orders[i], 1);
    emulation::run_all(options, i);
    emulation::run_measures(options.large);
  }
  emulation::run_codes();
  if (memsave_ext::probe_cuda() != __CUDA_ARCH__) emulation::fail("probe: no answer");
  emulation::finish(options, "Adam");
}
