// A step that is known, as bytes: a child process sends to its parent what ran there.
#pragma once

#include <memory>
#include <string>
#include <string_view>

#include "remat/known.h"

namespace memsave_ext::remat {

// Leaves out plans, and times of devices, which a step on fake tensors has not. Operators travel by
// name.
std::string to_bytes(const Known& step);
// Throws where an operator is not known here, or these are no such bytes.
std::shared_ptr<Known> known_from_bytes(std::string_view bytes);

}  // namespace memsave_ext::remat
