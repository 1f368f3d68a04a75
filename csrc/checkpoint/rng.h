// Random number generator states around a recomputed region: what the forward started from is kept,
// and put back for the length of the recompute. Also where the states are the same after the
// forward: the function may have drawn numbers and restored them itself (torch.random.fork_rng).
#pragma once

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

namespace memsave_ext::checkpoint {

// Whether this process has initialised CUDA; never initialises it (that would break a later fork).
// Needs the GIL until it has answered yes once.
bool cuda_in_use();

// Where the next kernel that is captured finds its random numbers.
struct GraphRng {
  uint64_t capture;         // CUDA's id of the capture
  at::Generator generator;  // the default one of the device
  int64_t* seed;            // device memory, as is `offset`; lives as long as the capture
  int64_t* offset;
  uint64_t place;  // how far the offset has moved since the capture began

  bool operator==(const GraphRng& other) const {
    return capture == other.capture && generator == other.generator && place == other.place;
  }

  // None where the current stream is not captured, or CUDA not in use. None in a build without
  // CUDA, too, where torch's generator then refuses to tell its seed during a capture.
  static std::optional<GraphRng> current();
};

// While it lives, the generator draws from that place on; afterwards it continues from where it
// was before.
class GraphRngScope {
 public:
  explicit GraphRngScope(const GraphRng& rng);
  ~GraphRngScope();
  GraphRngScope(const GraphRngScope&) = delete;
  GraphRngScope& operator=(const GraphRngScope&) = delete;

 private:
  at::Generator generator_;
  at::Generator outer_;  // shares the state that is set aside
};

// The CUDA devices among those of some tensors.
class CudaDevices {
 public:
  static CudaDevices all() {
    CudaDevices devices;
    devices.bits_ = ~uint64_t{0};
    return devices;
  }
  void add(const at::Tensor& tensor) {
    // A fake tensor would call Python to be asked for its device.
    if (tensor.defined() && tensor.key_set().has_backend(c10::BackendComponent::CUDABit)) {
      add(tensor.device());
    }
  }
  void add(c10::Device device) {
    if (device.is_cuda() && device.has_index()) bits_ |= uint64_t{1} << device.index();
  }
  void add(const CudaDevices& others) { bits_ |= others.bits_; }
  bool has(c10::DeviceIndex index) const { return (bits_ >> index & 1) != 0; }

 private:
  uint64_t bits_ = 0;
};

// Generators of the user's, each with a copy in the state in which it was added. CUDA's tell no
// state while a graph is captured, and are left out then.
class OwnGenerators {
 public:
  void add(at::Generator generator);
  bool has(const at::Generator& generator) const;
  // The same generators in their present states.
  OwnGenerators current() const;
  void restore() const;
  // Whether one of them has drawn a number since it was added.
  bool any_has_drawn() const;

 private:
  std::vector<std::pair<at::Generator, at::Generator>> states_;
};

// The present states. CPU: the Mersenne Twister itself (2.5 KB, no tensor). CUDA: seed and offset
// of the Philox generator, 16 bytes for each of the devices and for the current one, read without
// synchronising: it is the host's. On other devices other threads may draw meanwhile, as replicas
// of nn.DataParallel do. Torch asks the driver each time whether a graph is captured. While one is,
// the place in it instead: no other device can draw.
class RngState {
 public:
  explicit RngState(const CudaDevices& devices);

  // The user's, from which a function may draw.
  void add(const std::vector<at::Generator>& own);
  // Those that were not added.
  OwnGenerators others(const std::vector<at::Generator>& generators) const;

  // Forgets other devices' states.
  void keep(const CudaDevices& devices);

  // After the forward: a capture in which it drew no number need not be that of the recompute.
  // (Nothing can restore numbers that were drawn in a capture.)
  void forget_unused_capture();

  // Whether no number has been drawn since, but from the user's.
  bool is_present() const;

 private:
  friend class RngGuard;
  struct Cpu {
    static Cpu current();

    at::mt19937 engine;
    std::optional<float> next_float;
    std::optional<double> next_double;
  };
  struct Philox {
    at::Generator generator;
    uint64_t seed;
    uint64_t offset;

    bool operator==(const Philox& other) const {
      return generator == other.generator && seed == other.seed && offset == other.offset;
    }
  };
  std::vector<Philox> current_cuda() const;
  // The present states of the same generators.
  RngState current() const;
  // All but the place in a graph. `present`: the CUDA states, where they are known.
  void restore(const std::vector<Philox>& present = {}) const;

  CudaDevices devices_;
  Cpu cpu_;
  std::optional<GraphRng> graph_;
  std::vector<Philox> cuda_;
  OwnGenerators own_;
};

// Sets `state` for a scope and restores what it found, also when an exception leaves the scope.
// Throws where one of the two is in a CUDA graph's capture in which the other is not.
class RngGuard {
 public:
  explicit RngGuard(const RngState& state);
  ~RngGuard();
  RngGuard(const RngGuard&) = delete;
  RngGuard& operator=(const RngGuard&) = delete;

 private:
  explicit RngGuard(RngState&& outer) : outer_(std::move(outer)) {}

  RngState outer_;
  std::optional<GraphRngScope> graph_;
};

}  // namespace memsave_ext::checkpoint
