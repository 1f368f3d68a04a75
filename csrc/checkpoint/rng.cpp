#include "checkpoint/rng.h"

#include <ATen/detail/CUDAHooksInterface.h>

#include <mutex>

#include "checkpoint/device.h"

namespace memsave_ext {
namespace {

at::CPUGeneratorImpl* cpu_generator() {
  return at::detail::getDefaultCPUGenerator().get<at::CPUGeneratorImpl>();
}

bool same(const at::mt19937& a, const at::mt19937& b) {
  const auto left = a.data();
  const auto right = b.data();
  return left.left_ == right.left_ && left.next_ == right.next_ && left.seed_ == right.seed_ &&
         left.state_ == right.state_;
}

}  // namespace

RngState RngState::capture() {
  RngState state;
  {
    auto* generator = cpu_generator();
    const std::lock_guard<std::mutex> lock(generator->mutex_);
    state.cpu_ = {generator->engine(), generator->next_float_normal_sample(),
                  generator->next_double_normal_sample()};
  }
  if (cuda_in_use()) {
    const auto& cuda = at::detail::getCUDAHooks();
    for (c10::DeviceIndex device = 0; device < cuda.deviceCount(); ++device) {
      if (!cuda.hasPrimaryContext(device)) continue;
      at::Generator generator = cuda.getDefaultGenerator(device);
      const std::lock_guard<std::mutex> lock(generator.mutex());
      const uint64_t seed = generator.current_seed();
      const uint64_t offset = generator.get_offset();
      state.cuda_.push_back({std::move(generator), seed, offset});
    }
  }
  return state;
}

void RngState::restore() const {
  {
    auto* generator = cpu_generator();
    const std::lock_guard<std::mutex> lock(generator->mutex_);
    generator->set_engine(cpu_.engine);
    generator->set_next_float_normal_sample(cpu_.next_float);
    generator->set_next_double_normal_sample(cpu_.next_double);
  }
  for (const auto& device : cuda_) {
    at::Generator generator = device.generator;
    const std::lock_guard<std::mutex> lock(generator.mutex());
    generator.set_current_seed(device.seed);
    generator.set_offset(device.offset);  // last: setting the seed zeroes the offset
  }
}

bool RngState::operator==(const RngState& other) const {
  if (cuda_.size() != other.cuda_.size()) return false;
  for (size_t i = 0; i < cuda_.size(); ++i) {
    if (cuda_[i].seed != other.cuda_[i].seed || cuda_[i].offset != other.cuda_[i].offset) {
      return false;
    }
  }
  return cpu_.next_float == other.cpu_.next_float && cpu_.next_double == other.cpu_.next_double &&
         same(cpu_.engine, other.cpu_.engine);
}

}  // namespace memsave_ext
