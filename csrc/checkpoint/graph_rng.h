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
  uint64_t capture;         // that is under way, by CUDA's number
  at::Generator generator;  // the default one of the device
  int64_t* seed;            // on the device, as the offset, and alive as long as the capture
  int64_t* offset;
  uint64_t place;  // the offset's increase since the graph's beginning

  bool operator==(const GraphRng& other) const {
    return capture == other.capture && generator == other.generator && place == other.place;
  }

  // None where the current stream is not captured, or CUDA not in use. None in a build without
  // CUDA, too, where torch's generator then refuses to tell its seed during a capture.
  static std::optional<GraphRng> current();
};

// For a scope, the generator draws from that place on. What is drawn does not count: afterwards it
// goes on from where it was.
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
