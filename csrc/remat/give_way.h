// Blocks that give memory back where an allocator has none left (retry=True).
#pragma once

#include <c10/core/Device.h>

#include <cstdint>
#include <optional>

#include "remat/content.h"

namespace memsave_ext::remat {

class Block;

// What a block gives back, by what it costs.
enum class Gives {
  kShort,       // kept contents, where little else is recomputed for them
  kRecomputed,  // recomputed ones that backward has not come to yet
  kAny,         // kept ones, whatever it takes
};

// While it exists, allocators that have no memory left ask the block for some, on whatever thread.
class GivesWay {
 public:
  explicit GivesWay(Block& block);
  ~GivesWay();
  GivesWay(const GivesWay&) = delete;
  GivesWay& operator=(const GivesWay&) = delete;

 private:
  Block& block_;
  const DropsInBackward drops_;
};

// Lets CUDA's caching allocator ask, too. Only builds with CUDA have it.
void give_way_to_cuda();

}  // namespace memsave_ext::remat
