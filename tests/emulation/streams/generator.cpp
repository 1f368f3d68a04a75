// The generator: a seed and an offset, as CUDA's. While a graph is captured both are read from
// device memory, to which a replay writes them.
#include <ATen/Functions.h>

#include <mutex>

#include "ATen/cuda/CUDAGeneratorImpl.h"
#include "device.h"

namespace at {

using emulated::kDevice;

CUDAGeneratorImpl::CUDAGeneratorImpl(DeviceIndex, c10::intrusive_ptr<CUDAGeneratorState> state)
    : GeneratorImpl(kDevice, DispatchKeySet(DispatchKey::CUDA)),
      state_(state ? std::move(state) : c10::make_intrusive<CUDAGeneratorState>()) {}

void CUDAGeneratorImpl::refuse_while_captured() const {
  TORCH_CHECK(emulated::capture() == 0, "the generator is captured");
}

void CUDAGeneratorImpl::set_current_seed(uint64_t seed) {
  refuse_while_captured();
  state_->seed_ = seed;
  state_->philox_offset_per_thread_ = 0;
}

void CUDAGeneratorImpl::set_offset(uint64_t offset) {
  refuse_while_captured();
  state_->philox_offset_per_thread_ = offset;
}

uint64_t CUDAGeneratorImpl::get_offset() const {
  refuse_while_captured();
  return state_->philox_offset_per_thread_;
}

uint64_t CUDAGeneratorImpl::current_seed() const {
  refuse_while_captured();
  return state_->seed_;
}

uint64_t CUDAGeneratorImpl::seed() {
  set_current_seed(c10::detail::getNonDeterministicRandom());
  return current_seed();
}

c10::intrusive_ptr<c10::TensorImpl> CUDAGeneratorImpl::get_state() const {
  const auto state = at::empty({2}, at::kLong);
  state.mutable_data_ptr<int64_t>()[0] = static_cast<int64_t>(current_seed());
  state.mutable_data_ptr<int64_t>()[1] = static_cast<int64_t>(get_offset());
  return state.view(at::kByte).getIntrusivePtr();
}

void CUDAGeneratorImpl::set_state(const c10::TensorImpl& state) {
  const auto* const values = static_cast<const int64_t*>(state.data());
  set_current_seed(static_cast<uint64_t>(values[0]));
  set_offset(static_cast<uint64_t>(values[1]));
}

void CUDAGeneratorImpl::graphsafe_set_state(const c10::intrusive_ptr<c10::GeneratorImpl>& state) {
  state_ = dynamic_cast<CUDAGeneratorImpl&>(*state).state_;
}

c10::intrusive_ptr<c10::GeneratorImpl> CUDAGeneratorImpl::graphsafe_get_state() const {
  return c10::make_intrusive<CUDAGeneratorImpl>(0, state_);
}

CUDAGeneratorImpl* CUDAGeneratorImpl::clone_impl() const {
  return new CUDAGeneratorImpl(0, c10::make_intrusive<CUDAGeneratorState>(*state_));
}

PhiloxCudaState CUDAGeneratorImpl::philox_cuda_state(uint64_t increment) {
  if (const uint64_t number = emulated::capture()) {
    auto& captured = state_->capture_states_[number];
    if (!captured) {
      captured = c10::make_intrusive<CUDAGeneratorCaptureState>();
      captured->rng_state_seed_extragraph_ = at::zeros({1}, at::kLong);
      captured->rng_state_offset_extragraph_ = at::zeros({1}, at::kLong);
    }
    PhiloxCudaState from;
    from.seed_.ptr = captured->rng_state_seed_extragraph_.mutable_data_ptr<int64_t>();
    from.offset_.ptr = captured->rng_state_offset_extragraph_.mutable_data_ptr<int64_t>();
    from.offset_intragraph_ = captured->offset_intragraph_;
    captured->offset_intragraph_ += increment;
    return from;
  }
  PhiloxCudaState from;
  from.seed_.val = state_->seed_;
  from.offset_.val = state_->philox_offset_per_thread_;
  state_->philox_offset_per_thread_ += increment;
  return from;
}

void CUDAGeneratorImpl::replay_prologue(uint64_t number) {
  const auto found = state_->capture_states_.find(number);
  if (found == state_->capture_states_.end()) return;
  CUDAGeneratorCaptureState& captured = *found->second;
  const PhiloxCudaState from = philox_cuda_state(captured.offset_intragraph_);
  *captured.rng_state_seed_extragraph_.mutable_data_ptr<int64_t>() =
      static_cast<int64_t>(from.seed_.val);
  *captured.rng_state_offset_extragraph_.mutable_data_ptr<int64_t>() =
      static_cast<int64_t>(from.offset_.val);
}

namespace cuda::detail {

const Generator& getDefaultCUDAGenerator(DeviceIndex) {
  static const auto* generator = new Generator(make_generator<CUDAGeneratorImpl>());
  return *generator;
}

}  // namespace cuda::detail
}  // namespace at
