// Memory of contents as bytes: new, and copied.
#pragma once

#include <c10/core/Storage.h>

#include "remat/content.h"

namespace memsave_ext::remat {

// Returns memory for a content.
c10::Storage empty_for(const Content& content);

// Returns a copy of all bytes of a storage.
c10::Storage copy_of(const c10::Storage& storage);

}  // namespace memsave_ext::remat
