// The generator of the emulated device, by the names that checkpoint/cuda.cpp uses of CUDA's.
#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/TensorBase.h>
#include <c10/core/GeneratorImpl.h>

#include <cstdint>
#include <map>

namespace at {

struct CUDAGeneratorCaptureState : c10::intrusive_ptr_target {
  uint64_t offset_intragraph_ = 0;
  TensorBase rng_state_seed_extragraph_, rng_state_offset_extragraph_;
};

struct CUDAGeneratorState : c10::intrusive_ptr_target {
  uint64_t seed_ = 0, philox_offset_per_thread_ = 0;
  std::map<uint64_t, c10::intrusive_ptr<CUDAGeneratorCaptureState>> capture_states_;
};

struct PhiloxCudaState {
  struct Payload {
    uint64_t val = 0;
    int64_t* ptr = nullptr;  // of what is captured
  };
  Payload seed_, offset_;
  uint64_t offset_intragraph_ = 0;
};

struct CUDAGeneratorImpl final : c10::GeneratorImpl {
  explicit CUDAGeneratorImpl(DeviceIndex device = 0,
                             c10::intrusive_ptr<CUDAGeneratorState> state = nullptr);
  void set_current_seed(uint64_t seed) override;
  void set_offset(uint64_t offset) override;
  uint64_t get_offset() const override;
  uint64_t current_seed() const override;
  uint64_t seed() override;
  void set_state(const c10::TensorImpl& state) override;
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override;
  void graphsafe_set_state(const c10::intrusive_ptr<c10::GeneratorImpl>& state) override;
  c10::intrusive_ptr<c10::GeneratorImpl> graphsafe_get_state() const override;

  // Where the next numbers are from; moves on by `increment`.
  PhiloxCudaState philox_cuda_state(uint64_t increment);

  // Writes from where the numbers of a replay of this capture are, and moves on past them.
  void replay_prologue(uint64_t capture);

 private:
  CUDAGeneratorImpl* clone_impl() const override;
  void refuse_while_captured() const;

  c10::intrusive_ptr<CUDAGeneratorState> state_;
};

namespace cuda::detail {
const Generator& getDefaultCUDAGenerator(DeviceIndex device = 0);
}  // namespace cuda::detail
}  // namespace at
