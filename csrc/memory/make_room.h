// What an allocator that has no memory left asks, before it gives up.
#pragma once

#include <c10/core/Device.h>

#include <atomic>
#include <cstdint>

namespace memsave_ext::memory {

// Frees memory of the device that can be done without, until it is so many bytes or there is no
// more; returns how many. Null: nobody has any. The caller may hold the lock of a device's
// allocator which its holder can take again, as CUDA's, but no other lock.
inline std::atomic<int64_t (*)(c10::Device device, int64_t bytes)> make_room{nullptr};

}  // namespace memsave_ext::memory
