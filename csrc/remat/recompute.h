// Computing dropped contents again.
#pragma once

#include <c10/core/Storage.h>

#include <memory>

#include "remat/block.h"
#include "remat/content.h"

namespace memsave_ext::remat {

// The memory of a content, computed again where it was dropped. Throws CheckpointError where what
// it is computed from has changed. Without the GIL.
c10::Storage memory_of(Block& block, const std::shared_ptr<Content>& content);

// A copy of all bytes.
c10::Storage copy_of(const c10::Storage& storage);

}  // namespace memsave_ext::remat
