// How long operators take on a device that runs behind the host.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>

#include <memory>
#include <optional>

namespace memsave_ext::remat {

// The time between two events on the current stream of a device. Nothing waits for them: the time
// is known once the device has passed both.
class DeviceTime {
 public:
  // Of a CUDA device. Null while a graph is captured, and where tensors are fake.
  static std::unique_ptr<DeviceTime> start(c10::Device device);
  void stop();
  // Includes the time for which the device waited for the host between the two.
  std::optional<double> seconds() const;

 private:
  explicit DeviceTime(c10::Stream stream);

  const c10::Stream stream_;
  c10::Event begin_, end_;
};

}  // namespace memsave_ext::remat
