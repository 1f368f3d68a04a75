// Parameters that an optimizer stepped while something waits for its recompute: a region, or what
// remat dropped. A recompute that reads one of them would differentiate another function than the
// forward was, and no version counter tells where a fused kernel or a write to `.data` did it.
#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <cstdint>
#include <optional>

#include "checkpoint/tensors.h"

namespace memsave_ext::checkpoint {

// Something that can still be computed again. Steps are noted only while one exists. Making and
// destroying it takes no lock.
class Pending {
 public:
  Pending();
  ~Pending();
  Pending(const Pending&) = delete;
  Pending& operator=(const Pending&) = delete;

  // Whether any parameter was stepped since this was made.
  bool any_stepped() const;
  // As step_since().
  std::optional<uint32_t> stepped(const at::Tensor& tensor) const;

 private:
  const uint64_t since_;
};

bool is_any_pending();
// How many steps of parameters have been noted in this process.
uint64_t steps_so_far();
// The position, in its optimizer, of a parameter that lies in these bytes of the storage and was
// stepped when there had been more than `since` steps; nothing where none was.
std::optional<uint32_t> step_since(uint64_t since, const c10::StorageImpl* storage,
                                   ByteRange range);

// An optimizer has changed `param`, the `position`-th of its parameters.
void note_step(const at::Tensor& param, uint32_t position);

}  // namespace memsave_ext::checkpoint
