#include "checkpoint/rng.h"

#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <pybind11/pybind11.h>
#include <torch/csrc/utils/device_lazy_init.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <exception>
#include <mutex>

namespace memsave_ext::checkpoint {
namespace {

at::CPUGeneratorImpl* cpu_generator() {
  return at::detail::getDefaultCPUGenerator().get<at::CPUGeneratorImpl>();
}

}  // namespace

bool cuda_in_use() {
  static const bool built_with_cuda = at::detail::getCUDAHooks().hasCUDART();
  if (!built_with_cuda) return false;
  static std::atomic<bool> initialised{false};
  if (!initialised) {
    // C++ does not export this flag; torch.cuda keeps it. Operators are recorded without the GIL.
    const pybind11::gil_scoped_acquire gil;
    initialised = pybind11::module_::import("torch.cuda").attr("_initialized").cast<bool>();
  }
  return initialised && !torch::utils::is_device_in_bad_fork(at::kCUDA);
}

void OwnGenerators::add(at::Generator generator) {
  if (generator.device().is_cuda() && GraphRng::current()) return;
  const std::lock_guard<std::mutex> lock(generator.mutex());
  states_.emplace_back(generator, generator.clone());
}

bool OwnGenerators::has(const at::Generator& generator) const {
  return std::any_of(states_.begin(), states_.end(),
                     [&](const auto& state) { return state.first == generator; });
}

OwnGenerators OwnGenerators::current() const {
  OwnGenerators now;
  for (const auto& [generator, copy] : states_) now.add(generator);
  return now;
}

void OwnGenerators::restore() const {
  for (auto [generator, copy] : states_) {
    const std::lock_guard<std::mutex> lock(generator.mutex());
    generator.set_state(copy.get_state());
  }
}

bool OwnGenerators::any_has_drawn() const {
  return std::any_of(states_.begin(), states_.end(), [](const auto& state) {
    at::Generator generator = state.first;
    const std::lock_guard<std::mutex> lock(generator.mutex());
    const at::Tensor now = generator.get_state(), before = state.second.get_state();
    return std::memcmp(now.const_data_ptr(), before.const_data_ptr(), before.nbytes()) != 0;
  });
}

RngState::Cpu RngState::Cpu::current() {
  auto* generator = cpu_generator();
  const std::lock_guard<std::mutex> lock(generator->mutex_);
  return {generator->engine(), generator->next_float_normal_sample(),
          generator->next_double_normal_sample()};
}

std::vector<RngState::Philox> RngState::current_cuda() const {
  std::vector<Philox> states;
  const auto& cuda = at::detail::getCUDAHooks();
  for (c10::DeviceIndex device = 0; device < cuda.deviceCount(); ++device) {
    if (!devices_.has(device)) continue;
    at::Generator generator = cuda.getDefaultGenerator(device);
    const std::lock_guard<std::mutex> lock(generator.mutex());
    try {
      const uint64_t seed = generator.current_seed();
      const uint64_t offset = generator.get_offset();
      states.push_back({std::move(generator), seed, offset});
    } catch (c10::Error& error) {
      error.add_context(
          "memsave_ext: to draw random numbers in a CUDA graph, a checkpointed region and an "
          "operator in remat need a build of memsave_ext with CUDA; with this build, pass "
          "preserve_rng_state=False to checkpoint, or capture no graph");
      throw;
    }
  }
  return states;
}

RngState::RngState(const CudaDevices& devices)
    : devices_(devices), cpu_(Cpu::current()), graph_(GraphRng::current()) {
  if (graph_ || !cuda_in_use()) return;
  devices_.add(c10::impl::VirtualGuardImpl(c10::DeviceType::CUDA).getDevice());
  cuda_ = current_cuda();
}

void RngState::add(const std::vector<at::Generator>& own) {
  for (const auto& generator : own) own_.add(generator);
}

OwnGenerators RngState::others(const std::vector<at::Generator>& generators) const {
  OwnGenerators others;
  for (const auto& generator : generators) {
    if (!own_.has(generator)) others.add(generator);
  }
  return others;
}

RngState RngState::current() const {
  RngState now(devices_);
  now.own_ = own_.current();
  return now;
}

void RngState::restore(const std::vector<Philox>& present) const {
  {
    auto* generator = cpu_generator();
    const std::lock_guard<std::mutex> lock(generator->mutex_);
    generator->set_engine(cpu_.engine);
    generator->set_next_float_normal_sample(cpu_.next_float);
    generator->set_next_double_normal_sample(cpu_.next_double);
  }
  for (size_t i = 0; i < cuda_.size(); ++i) {
    const Philox& device = cuda_[i];
    // Each question and each change asks the driver whether a graph is captured.
    if (i < present.size() && device == present[i]) continue;
    at::Generator generator = device.generator;
    const std::lock_guard<std::mutex> lock(generator.mutex());
    generator.set_current_seed(device.seed);
    generator.set_offset(device.offset);  // last: setting the seed zeroes the offset
  }
  own_.restore();
}

void RngState::keep(const CudaDevices& devices) {
  devices_ = devices;
  if (cuda_.empty()) return;
  devices_.add(c10::impl::VirtualGuardImpl(c10::DeviceType::CUDA).getDevice());
  cuda_.erase(std::remove_if(
                  cuda_.begin(), cuda_.end(),
                  [&](const Philox& one) { return !devices_.has(one.generator.device().index()); }),
              cuda_.end());
}

void RngState::forget_unused_capture() {
  if (graph_ && graph_ == GraphRng::current()) graph_.reset();
}

bool RngState::is_present() const {
  const RngState other(devices_);
  const at::mt19937_data_pod a = cpu_.engine.data(), b = other.cpu_.engine.data();
  return a.left_ == b.left_ && a.next_ == b.next_ && a.seed_ == b.seed_ && a.state_ == b.state_ &&
         cpu_.next_float == other.cpu_.next_float && cpu_.next_double == other.cpu_.next_double &&
         graph_ == other.graph_ && cuda_ == other.cuda_;
}

// From the other constructor's end on the destructor restores, also where this one throws.
RngGuard::RngGuard(const RngState& state) : RngGuard(state.current()) {
  const bool captured = state.graph_.has_value();
  const bool capturing = outer_.graph_.has_value();
  // Without a device's state there is nothing that a capture would keep from being set.
  const bool possible = captured ? capturing && state.graph_->capture == outer_.graph_->capture
                                 : !capturing || state.cuda_.empty();
  TORCH_CHECK(possible, "memsave_ext: a forward that draws random numbers ran ",
              captured ? "while a CUDA graph was captured" : "outside of a CUDA graph",
              ", and its recompute ", capturing ? "while another was captured" : "outside of it",
              ", where it would draw others. Capture forward and backward in one graph "
              "(torch.cuda.make_graphed_callables makes two), or draw no random numbers in it.");
  if (captured) graph_.emplace(*state.graph_);
  state.restore(outer_.cuda_);
}

RngGuard::~RngGuard() {
  try {
    outer_.restore();
  } catch (const std::exception&) {
    // The device has failed, of which others will tell.
  }
}

#ifndef MEMSAVE_EXT_WITH_CUDA
std::optional<GraphRng> GraphRng::current() { return std::nullopt; }
GraphRngScope::GraphRngScope(const GraphRng&) {}
GraphRngScope::~GraphRngScope() = default;
#endif

}  // namespace memsave_ext::checkpoint
