// How fast memory is moved elsewhere, as a number for plans.
#pragma once

namespace memsave_ext::store {

// Bytes per second of copies out and back.
struct Speed {
  double out = 0, back = 0;
};

}  // namespace memsave_ext::store
