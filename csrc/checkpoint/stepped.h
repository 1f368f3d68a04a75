// Parameters that an optimizer of this package stepped while regions wait for their recompute. A
// recompute that reads one of them would differentiate another function than the forward was.
#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <cstdint>
#include <optional>

namespace memsave_ext {

// The bytes of a storage that a tensor's elements lie in.
struct ByteRange {
  int64_t begin, end;

  static ByteRange of(const at::Tensor& tensor);
  bool overlaps(const ByteRange& other) const { return begin < other.end && other.begin < end; }
};

// A region that can still be computed again. Steps are noted only while one exists.
class PendingRegion {
 public:
  PendingRegion();
  ~PendingRegion();
  PendingRegion(const PendingRegion&) = delete;
  PendingRegion& operator=(const PendingRegion&) = delete;

  // Whether any parameter was stepped since this was made.
  bool any_stepped() const;
  // The position, in its optimizer, of a parameter that shares memory with `tensor` and was stepped
  // since this was made; nothing where none was.
  std::optional<uint32_t> stepped(const at::Tensor& tensor) const;

 private:
  const uint64_t since_;
};

// An optimizer has changed `param`, the `position`-th of its parameters.
void note_step(const at::Tensor& param, uint32_t position);

}  // namespace memsave_ext
