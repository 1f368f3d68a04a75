// The CUDA device and stream a region ran on, restored for its recompute. Needs no CUDA header: the
// calls go through c10's virtual device guard, so the CPU build has them too.
#pragma once

#include <c10/core/Stream.h>
#include <c10/core/StreamGuard.h>

#include <optional>

namespace memsave_ext {

// Whether this process has initialised CUDA; never initialises it (that would break a later fork).
// Needs the GIL until it has answered yes once.
bool cuda_in_use();

// The current stream of the current CUDA device, if CUDA is in use.
std::optional<c10::Stream> current_cuda_stream();

// Makes `stream` and its device current. Where another stream was current, the work queued there
// is waited for on entry, and waits for ours on exit. The device waits, not the host.
class StreamScope {
 public:
  explicit StreamScope(const std::optional<c10::Stream>& stream);
  ~StreamScope();
  StreamScope(const StreamScope&) = delete;
  StreamScope& operator=(const StreamScope&) = delete;

 private:
  std::optional<c10::Stream> outer_;
  std::optional<c10::Stream> inner_;
  c10::OptionalStreamGuard guard_;
};

}  // namespace memsave_ext
