#include "checkpoint/rng.h"

#include <ATen/detail/CUDAHooksInterface.h>

#include <algorithm>
#include <mutex>

#include "checkpoint/device.h"

namespace memsave_ext {
namespace {

at::CPUGeneratorImpl* cpu_generator() {
  return at::detail::getDefaultCPUGenerator().get<at::CPUGeneratorImpl>();
}

}  // namespace

RngState::Cpu RngState::Cpu::current() {
  auto* generator = cpu_generator();
  const std::lock_guard<std::mutex> lock(generator->mutex_);
  return {generator->engine(), generator->next_float_normal_sample(),
          generator->next_double_normal_sample()};
}

bool RngState::Cpu::operator==(const Cpu& other) const {
  const auto a = engine.data();
  const auto b = other.engine.data();
  return a.left_ == b.left_ && a.next_ == b.next_ && a.seed_ == b.seed_ && a.state_ == b.state_ &&
         next_float == other.next_float && next_double == other.next_double;
}

std::vector<RngState::Philox> RngState::current_cuda() {
  std::vector<Philox> states;
  if (!cuda_in_use()) return states;
  const auto& cuda = at::detail::getCUDAHooks();
  for (c10::DeviceIndex device = 0; device < cuda.deviceCount(); ++device) {
    if (!cuda.hasPrimaryContext(device)) continue;
    at::Generator generator = cuda.getDefaultGenerator(device);
    const std::lock_guard<std::mutex> lock(generator.mutex());
    const uint64_t seed = generator.current_seed();
    const uint64_t offset = generator.get_offset();
    states.push_back({std::move(generator), seed, offset});
  }
  return states;
}

RngState::RngState() : cpu_(Cpu::current()), cuda_(current_cuda()) {}

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

bool RngState::is_current() const {
  const auto cuda = current_cuda();
  return cpu_ == Cpu::current() && std::equal(cuda_.begin(), cuda_.end(), cuda.begin(), cuda.end(),
                                              [](const Philox& a, const Philox& b) {
                                                return a.seed == b.seed && a.offset == b.offset;
                                              });
}

}  // namespace memsave_ext
