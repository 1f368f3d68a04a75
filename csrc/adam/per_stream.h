// Scalars that hooks accumulate into, on whichever streams they run.
#pragma once

#include <ATen/core/Tensor.h>

#include <map>
#include <optional>
#include <vector>

#include "streams.h"

namespace memsave_ext::adam {

struct DeviceLess {
  bool operator()(c10::Device a, c10::Device b) const {
    return a.type() != b.type() ? a.type() < b.type() : a.index() < b.index();
  }
};

template <typename T>
using ByDevice = std::map<c10::Device, T, DeviceLess>;

// One tensor for each stream. Only that stream makes, changes and frees it, so that no hook waits
// for another stream. combined() merges a device's tensors once, on the stream that reads them.
class PerStream {
 public:
  // Returns the tensor of the device's current stream; undefined at first.
  at::Tensor& here(c10::Device device) {
    const auto stream = current_stream(device);
    for (Part& part : parts_) {
      if (part.device == device && part.stream == stream) return part.tensor;
    }
    return parts_.emplace_back(Part{device, stream, {}}).tensor;
  }

  // Returns for each device all its tensors, merged by combine(a, b).
  template <typename Combine>
  ByDevice<at::Tensor> combined(const Combine& combine) const {
    ByDevice<at::Tensor> of_devices;
    for (const Part& part : parts_) {
      use_here(part.tensor, part.stream);
      at::Tensor& all = of_devices[part.device];
      all = all.defined() ? combine(all, part.tensor) : part.tensor;
    }
    return of_devices;
  }

  void clear() { parts_.clear(); }

 private:
  struct Part {
    c10::Device device;
    std::optional<c10::Stream> stream;
    at::Tensor tensor;
  };

  std::vector<Part> parts_;
};

}  // namespace memsave_ext::adam
