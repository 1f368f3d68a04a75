// Random numbers while a CUDA graph is captured. A kernel that is captured gets no seed and offset:
// it gets the two addresses to which every replay writes them, and how far into the graph's numbers
// it begins. A recompute captured by the same graph is given the addresses and the place of its
// forward, and so draws the same in every replay.
#pragma once

#include <ATen/core/Generator.h>

#include <cstdint>
#include <optional>

namespace memsave_ext {

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

}  // namespace memsave_ext
