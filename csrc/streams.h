// Streams of devices, through c10's virtual guard: needs no CUDA header. A CPU has none.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <optional>

namespace memsave_ext {

inline std::optional<c10::Stream> current_stream(c10::Device device) {
  // A fake tensor's device need not be one of this build.
  if (device.is_cpu() || !c10::impl::hasDeviceGuardImpl(device.type())) return std::nullopt;
  return c10::impl::VirtualGuardImpl(device.type()).getStream(device);
}

// What `later` is given from here on runs after what `earlier` has been given.
inline void order_after(const c10::Stream& later, const c10::Stream& earlier) {
  if (later == earlier) return;
  c10::Event event(earlier.device_type());
  event.record(earlier);
  event.block(later);
}

// Before the current stream reads or writes what another has made: it waits for that one, and the
// memory is nobody else's before it is done. A tensor that is freed is otherwise given to the next
// that is allocated on the stream it was made on, whatever other streams still do with it.
inline void use_here(const at::Tensor& tensor, const std::optional<c10::Stream>& made_on) {
  const auto current = current_stream(tensor.device());
  if (!made_on || made_on == current) return;
  order_after(*current, *made_on);
  tensor.record_stream(*current);
}

}  // namespace memsave_ext
