#include "remat/device_time.h"

#include "cuda_stream.h"
#include "streams.h"

namespace memsave_ext::remat {

std::unique_ptr<DeviceTime> DeviceTime::start(c10::Device device) {
  if (is_capturing(device)) return nullptr;
  const auto stream = current_stream(device);
  if (!stream) return nullptr;  // fake tensors, of a device that is not there
  return std::unique_ptr<DeviceTime>(new DeviceTime(*stream));
}

DeviceTime::DeviceTime(c10::Stream stream)
    : stream_(stream),
      begin_(stream.device_type(), c10::EventFlag::BACKEND_DEFAULT),
      end_(stream.device_type(), c10::EventFlag::BACKEND_DEFAULT) {
  begin_.record(stream_);
}

void DeviceTime::stop() { end_.record(stream_); }

std::optional<double> DeviceTime::seconds() const {
  if (is_capturing(stream_.device())) return std::nullopt;  // no event may be queried then
  if (!end_.was_marked_for_recording() || !end_.query() || !begin_.query()) return std::nullopt;
  constexpr double kMillisecond = 1e-3;
  return kMillisecond * begin_.elapsedTime(end_);
}

}  // namespace memsave_ext::remat
