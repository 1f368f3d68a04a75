// Random number generator states around a recomputed region: what the forward started from is kept,
// and put back for the length of the recompute. Also where the states are the same after the
// forward: the function may have drawn numbers and restored them itself (torch.random.fork_rng).
#pragma once

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/Generator.h>

#include <optional>
#include <vector>

#include "checkpoint/graph_rng.h"

namespace memsave_ext {

// The present states. CPU: the Mersenne Twister itself (2.5 KB, no tensor). CUDA: seed and offset
// of the Philox generator, 16 bytes for every device, read without synchronising: it is the host's,
// and asks the driver nothing, not even which devices have a context. While a CUDA graph is
// captured, the place in it instead: no other device can draw.
class RngState {
 public:
  RngState();

  // After the forward: a capture in which it drew no number need not be that of the recompute.
  // (Nothing can restore numbers that were drawn in a capture.)
  void forget_unused_capture();

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
  };
  static std::vector<Philox> current_cuda();
  void restore() const;  // all but the place in a graph

  Cpu cpu_;
  std::optional<GraphRng> graph_;
  std::vector<Philox> cuda_;
};

// Sets `state` for a scope and restores what it found, also when an exception leaves the scope.
// Throws where one of the two is in a CUDA graph's capture in which the other is not.
class RngGuard {
 public:
  explicit RngGuard(const RngState& state);
  ~RngGuard() { outer_.restore(); }
  RngGuard(const RngGuard&) = delete;
  RngGuard& operator=(const RngGuard&) = delete;

 private:
  RngState outer_;
  std::optional<GraphRngScope> graph_;
};

}  // namespace memsave_ext
