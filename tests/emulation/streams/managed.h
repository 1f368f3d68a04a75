// Managed memory: kernels use it wherever it is, which is never wrong. What is slow is counted:
// uses of what is not on the device, or is moved meanwhile.
#pragma once

#include "clocks.h"

namespace emulated {

void* managed(size_t bytes);
void free_managed(void* data);
void move_managed(const void* data, size_t bytes, bool to_device, StreamId stream);
// Work that uses memory, managed or not, has been queued.
void note_uses(StreamId stream, const std::vector<Use>& uses);
// How many such there were since the last call.
int64_t take_faults();
// The most bytes that can have been on the device at once, since the last call.
int64_t take_most_managed();

}  // namespace emulated
