// Random number generator states around a recomputed region: what the forward started from is kept
// only when the forward drew from it, and put back for the length of the recompute.
#pragma once

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/Generator.h>

#include <optional>
#include <vector>

#include "checkpoint/graph_rng.h"

namespace memsave_ext {

// The present states. CPU: the Mersenne Twister itself (2.5 KB, no tensor). CUDA: seed and offset
// of the Philox generator, 16 bytes for every device that has a context, read without
// synchronising. While a CUDA graph is captured, the place in it instead: no other device can draw.
class RngState {
 public:
  RngState();

  bool is_current() const;

 private:
  friend class RngGuard;
  struct Cpu {
    static Cpu current();
    bool operator==(const Cpu& other) const;

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
