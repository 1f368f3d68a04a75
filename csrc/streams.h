// Streams of devices, through c10's virtual guard, which needs no CUDA header.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>
#include <c10/core/Storage.h>
#include <c10/core/Stream.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <optional>

namespace memsave_ext {

// Returns the device's current stream; nullopt for a CPU, which has none.
inline std::optional<c10::Stream> current_stream(c10::Device device) {
  // A fake tensor may be on a device that this build does not support.
  if (device.is_cpu() || !c10::impl::hasDeviceGuardImpl(device.type())) return std::nullopt;
  return c10::impl::VirtualGuardImpl(device.type()).getStream(device);
}

// Makes work queued on `later` from here on wait for the work queued on `earlier` so far.
inline void order_after(const c10::Stream& later, const c10::Stream& earlier) {
  if (later == earlier) return;
  c10::Event event(earlier.device_type());
  event.record(earlier);
  event.block(later);
}

// Makes the device's current stream wait for `made_on`. Returns it where the two differ.
inline std::optional<c10::Stream> wait_here(c10::Device device,
                                            const std::optional<c10::Stream>& made_on) {
  if (!made_on) return std::nullopt;
  const auto current = current_stream(device);
  if (made_on == current) return std::nullopt;
  order_after(*current, *made_on);
  return current;
}

// Call this before the current stream reads or writes a tensor that stream `made_on` made. Makes
// the current stream wait for that one, and keeps the tensor's memory from being reused until the
// current stream is done with it. Without that, freed memory goes to the next tensor allocated on
// the stream it was made on, whatever other streams still do with it.
inline void use_here(const at::Tensor& tensor, const std::optional<c10::Stream>& made_on) {
  const auto current = wait_here(tensor.device(), made_on);
  if (current) tensor.record_stream(*current);
}

inline void use_here(const c10::Storage& storage, const std::optional<c10::Stream>& made_on) {
  const auto current = wait_here(storage.device(), made_on);
  if (!current) return;
  const c10::impl::VirtualGuardImpl guard(storage.device_type());
  guard.recordDataPtrOnStream(storage.data_ptr(), *current);
}

}  // namespace memsave_ext
