#include "checkpoint/surroundings.h"

#include <ATen/autocast_mode.h>
#include <c10/core/DefaultDtype.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>

#include <tuple>
#include <utility>

#include "streams.h"

namespace memsave_ext::checkpoint {

using at::Context;
using at::Float32Backend;
using at::Float32Op;
using at::Float32Precision;

namespace {

struct Flag {
  bool (Context::*get)() const;
  void (Context::*set)(bool);
};

constexpr Flag kFlags[] = {
    {&Context::userEnabledMkldnn, &Context::setUserEnabledMkldnn},
    {&Context::deterministicMkldnn, &Context::setDeterministicMkldnn},
    {&Context::userEnabledNNPACK, &Context::setUserEnabledNNPACK},
    {&Context::userEnabledCuDNN, &Context::setUserEnabledCuDNN},
    {&Context::deterministicCuDNN, &Context::setDeterministicCuDNN},
    {&Context::benchmarkCuDNN, &Context::setBenchmarkCuDNN},
    {&Context::deterministicFillUninitializedMemory,
     &Context::setDeterministicFillUninitializedMemory},
    {&Context::userEnabledFlashSDP, &Context::setSDPUseFlash},
    {&Context::userEnabledMemEfficientSDP, &Context::setSDPUseMemEfficient},
    {&Context::userEnabledMathSDP, &Context::setSDPUseMath},
    {&Context::userEnabledCuDNNSDP, &Context::setSDPUseCuDNN},
    {&Context::allowFP16BF16ReductionMathSDP, &Context::setAllowFP16BF16ReductionMathSDP},
    {&Context::allowFP16AccumulationCuBLAS, &Context::setAllowFP16AccumulationCuBLAS},
    {&Context::allowFP16ReductionCPU, &Context::setAllowFP16ReductionCPU},
};
// Two flags that are set together.
constexpr uint32_t kDeterministic = 1u << 30, kWarnOnly = 1u << 31;

constexpr std::pair<Float32Backend, Float32Op> kFloat32[] = {
    {Float32Backend::GENERIC, Float32Op::ALL},   {Float32Backend::MKLDNN, Float32Op::ALL},
    {Float32Backend::MKLDNN, Float32Op::CONV},   {Float32Backend::MKLDNN, Float32Op::RNN},
    {Float32Backend::MKLDNN, Float32Op::MATMUL}, {Float32Backend::CUDA, Float32Op::ALL},
    {Float32Backend::CUDA, Float32Op::CONV},     {Float32Backend::CUDA, Float32Op::RNN},
    {Float32Backend::CUDA, Float32Op::MATMUL},
};
constexpr size_t kMkldnnMatmul = 4, kCudaConv = 6, kCudaMatmul = 8;

void set_reduction(void (Context::*set)(bool, bool), at::CuBLASReductionOption option) {
  using Option = at::CuBLASReductionOption;
  (at::globalContext().*set)(option != Option::DisallowReducedPrecisionDisallowSplitK &&
                                 option != Option::DisallowReducedPrecisionAllowSplitK,
                             option != Option::DisallowReducedPrecisionDisallowSplitK);
}

}  // namespace

Settings Settings::capture(const Settings* products) {
  const Context& context = at::globalContext();
  Settings settings;
  settings.default_dtype_ = c10::get_default_dtype_as_scalartype();
  settings.flags_ = (context.deterministicAlgorithms() ? kDeterministic : 0) |
                    (context.deterministicAlgorithmsWarnOnly() ? kWarnOnly : 0);
  for (size_t i = 0; i < std::size(kFlags); ++i) {
    settings.flags_ |= static_cast<uint32_t>((context.*kFlags[i].get)()) << i;
  }
  settings.cublas_reductions_ = {context.allowFP16ReductionCuBLAS(),
                                 context.allowBF16ReductionCuBLAS()};
  settings.linalg_ = context.linalgPreferredBackend();
  if (products) {
    settings.float32_ = products->float32_;
    return settings;
  }
  for (size_t i = 0; i < std::size(kFloat32); ++i) {
    settings.float32_[i] = context.float32Precision(kFloat32[i].first, kFloat32[i].second);
  }
  return settings;
}

bool Settings::operator==(const Settings& other) const {
  const auto all = [](const Settings& s) {
    return std::tie(s.default_dtype_, s.flags_, s.cublas_reductions_, s.linalg_, s.float32_);
  };
  return all(*this) == all(other);
}

void Settings::restore(const Settings& now) const {
  Context& context = at::globalContext();
  if (default_dtype_ != now.default_dtype_) {
    c10::set_default_dtype(c10::scalarTypeToTypeMeta(default_dtype_));
  }
  const uint32_t changed = flags_ ^ now.flags_;
  if (changed & (kDeterministic | kWarnOnly)) {
    context.setDeterministicAlgorithms(flags_ & kDeterministic, flags_ & kWarnOnly);
  }
  for (size_t i = 0; i < std::size(kFlags); ++i) {
    if (changed >> i & 1) (context.*kFlags[i].set)(flags_ >> i & 1);
  }
  if (cublas_reductions_[0] != now.cublas_reductions_[0]) {
    set_reduction(&Context::setAllowFP16ReductionCuBLAS, cublas_reductions_[0]);
  }
  if (cublas_reductions_[1] != now.cublas_reductions_[1]) {
    set_reduction(&Context::setAllowBF16ReductionCuBLAS, cublas_reductions_[1]);
  }
  if (linalg_ != now.linalg_) context.setLinalgPreferredBackend(linalg_);
  if (float32_ != now.float32_) restore_float32(now);
}

// torch has two sets of functions for these, and refuses to compute where what was set by the older
// ones contradicts the newer. So the older ones are called first.
void Settings::restore_float32(const Settings& now) const {
  Context& context = at::globalContext();
  const Float32Precision cuda = float32_[kCudaMatmul], mkldnn = float32_[kMkldnnMatmul];
  if (cuda != now.float32_[kCudaMatmul] || mkldnn != now.float32_[kMkldnnMatmul]) {
    const bool is_high = cuda == Float32Precision::TF32;
    const bool is_medium = is_high && mkldnn == Float32Precision::BF16;
    context.setFloat32MatmulPrecision(is_medium ? "medium" : is_high ? "high" : "highest");
  }
  if (float32_[kCudaConv] != now.float32_[kCudaConv]) {
    context.setAllowTF32CuDNN(float32_[kCudaConv] != Float32Precision::IEEE &&
                              float32_[kCudaConv] != Float32Precision::NONE);
  }
  for (size_t i = 0; i < std::size(kFloat32); ++i) {
    const auto [backend, op] = kFloat32[i];
    if (context.float32Precision(backend, op) != float32_[i]) {
      context.setFloat32Precision(backend, op, float32_[i]);
    }
  }
}

SettingsGuard::SettingsGuard(const Settings& settings, bool products)
    : settings_(settings), products_(products), outer_(present()), needed_(!(settings_ == outer_)) {
  if (needed_) settings_.restore(outer_);
}

SettingsGuard::~SettingsGuard() {
  if (needed_) outer_.restore(present());
}

AutocastState AutocastState::capture() {
  AutocastState state;
  state.cache_enabled_ = at::autocast::is_autocast_cache_enabled();
  // Autocast is on where its key is not excluded, as it is by default.
  state.any_enabled_ =
      !c10::impl::tls_local_dispatch_key_set().excluded_.has_all(c10::autocast_dispatch_keyset);
  for (size_t i = 0; i < rules().autocast_devices.size(); ++i) {
    state.devices_[i] = {at::autocast::is_autocast_enabled(rules().autocast_devices[i]),
                         at::autocast::get_autocast_dtype(rules().autocast_devices[i])};
  }
  return state;
}

void AutocastState::restore() const {
  for (size_t i = 0; i < rules().autocast_devices.size(); ++i) {
    at::autocast::set_autocast_enabled(rules().autocast_devices[i], devices_[i].enabled);
    at::autocast::set_autocast_dtype(rules().autocast_devices[i], devices_[i].dtype);
  }
  at::autocast::set_autocast_cache_enabled(cache_enabled_);
}

AutocastState AutocastState::without_cache() const {
  AutocastState state = *this;
  state.cache_enabled_ = false;
  return state;
}

std::optional<c10::Stream> current_cuda_stream() {
  if (!cuda_in_use()) return std::nullopt;
  const c10::impl::VirtualGuardImpl cuda(c10::DeviceType::CUDA);
  return cuda.getStream(cuda.getDevice());
}

StreamScope::StreamScope(const std::optional<c10::Stream>& stream) {
  if (!stream) return;
  const c10::impl::VirtualGuardImpl cuda(c10::DeviceType::CUDA);
  const c10::Stream current = cuda.getStream(stream->device());
  guard_.reset_stream(*stream);
  if (current != *stream) {
    outer_ = current;
    inner_ = stream;
    order_after(*inner_, *outer_);
  }
}

StreamScope::~StreamScope() {
  if (!outer_) return;
  try {
    order_after(*outer_, *inner_);
  } catch (const std::exception& error) {
    TORCH_WARN("CheckpointFunction: could not order the streams after a recompute: ", error.what());
  }
}

}  // namespace memsave_ext::checkpoint
