// Recomputes dropped contents.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Storage.h>

#include <memory>

#include "remat/block.h"
#include "remat/content.h"

namespace memsave_ext::remat {

// Returns the memory of a content, recomputed where it was dropped. Throws CheckpointError where
// what it is computed from has changed. Call it without the GIL.
c10::Storage memory_of(Block& block, const std::shared_ptr<Content>& content);

// Returns memory for a content.
c10::Storage empty_for(const Content& content);

// Returns a copy of all bytes of a storage.
c10::Storage copy_of(const c10::Storage& storage);

}  // namespace memsave_ext::remat
