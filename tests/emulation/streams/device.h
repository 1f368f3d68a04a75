// The device: its memory is the host's, its streams are those of clocks.h. There is one.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>

#include <atomic>

#include "clocks.h"

namespace emulated {

inline const c10::Device kDevice(c10::DeviceType::CUDA, 0);

StreamId current_stream();  // of this thread
c10::Allocator* device_allocator();
// The kernel of attention that torch chooses, as a number of at::SDPBackend.
extern std::atomic<int64_t> chosen_attention;
extern std::atomic<bool> records_history;  // what the allocator says of itself
extern std::atomic<bool> refuses_waits;    // whether it is a failure that an operator waits
int64_t bytes_allocated();
// How much memory there is. Where it is limited, the allocator keeps nothing to reuse: before every
// allocation it lets the package free some, as CUDA's does where it has no block.
size_t memory();
void limit_memory(size_t bytes);  // 0: it is not limited
// How often the allocator was asked for its statistics.
int64_t questions();
int64_t recorded_events();  // since the device was loaded
// Without an operator, and the most that the allocator has given out since.
void allocate_for_a_moment(size_t bytes);
// Whether it is a failure to ask for statistics with a lock that an allocation on another thread,
// which reports to the same, waits for.
void check_lock_of_stats(bool check);
// The next allocation, on whatever thread, waits before it takes the allocator's lock.
void stop_next_allocation();
void wait_until_it_has_stopped();
// Lets it go on, if nobody has. Returns whether it has ended within so many seconds.
bool let_it_end(double seconds);
// The bytes that a tensor covers.
Use use_of(const at::Tensor& tensor, bool writes);

}  // namespace emulated
