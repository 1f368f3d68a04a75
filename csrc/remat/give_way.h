// Blocks that give memory back where an allocator has none left (retry=True).
#pragma once

#include <c10/core/Device.h>

#include <cstdint>

#include "remat/content.h"

namespace memsave_ext::remat {

// What is given back, by what it costs.
enum class Gives {
  kUnneeded,    // as kShort, of what nothing dropped is computed from
  kShort,       // kept contents, where little else is recomputed for them
  kRecomputed,  // recomputed ones that backward has not come to yet
  kAny,         // kept ones, whatever it takes
};

class Giver {
 public:
  // Drops what it holds on the device, from the oldest on, until it is so many bytes or there is no
  // more. Returns how many. What anybody else refers to, as running operators do, is not dropped.
  // On any thread, where the lock of the device's allocator may be held.
  virtual int64_t give_way(c10::Device device, int64_t enough, Gives what) = 0;

 protected:
  ~Giver() = default;
};

// While it exists, allocators that have no memory left ask the giver for some, on whatever thread.
class GivesWay {
 public:
  explicit GivesWay(Giver& giver);
  ~GivesWay();
  GivesWay(const GivesWay&) = delete;
  GivesWay& operator=(const GivesWay&) = delete;

 private:
  Giver& giver_;
  const DropsInBackward drops_;
};

// Lets CUDA's caching allocator ask, too. Only builds with CUDA have it.
void give_way_to_cuda();

}  // namespace memsave_ext::remat
