#include "remat/random.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/Tensor.h>

#include <algorithm>

namespace memsave_ext::remat {
namespace {

at::Generator clone_of(at::Generator generator) {
  const std::lock_guard<std::mutex> lock(generator.mutex());
  return generator.clone();
}

bool all_on_cpu(c10::ArrayRef<const c10::IValue> arguments) {
  return std::all_of(arguments.begin(), arguments.end(), [](const c10::IValue& value) {
    if (value.isTensor()) return !value.toTensor().defined() || value.toTensor().is_cpu();
    return !value.isDevice() || value.toDevice().is_cpu();
  });
}

}  // namespace

std::optional<Random> Random::of(const Operator& op, c10::ArrayRef<const c10::IValue> arguments) {
  if (op.generator && *op.generator < arguments.size()) {
    const c10::IValue& given = arguments[*op.generator];
    if (given.isGenerator() && given.toGenerator().defined()) {
      // A CUDA graph in capture would not know the generator's copy.
      if (!all_on_cpu(arguments) && GraphRng::current()) return std::nullopt;
      return Random{clone_of(given.toGenerator()), nullptr};
    }
    if (all_on_cpu(arguments)) {
      return Random{clone_of(at::detail::getDefaultCPUGenerator()), nullptr};
    }
  }
  return Random{std::nullopt, std::make_shared<const RngState>()};
}

RandomGuard::RandomGuard(const Random& random, const Operator& op,
                         std::vector<c10::IValue>& arguments) {
  if (random.generator) {
    arguments[*op.generator] = clone_of(*random.generator);
  } else {
    defaults_.emplace(*random.defaults);
  }
}

}  // namespace memsave_ext::remat
