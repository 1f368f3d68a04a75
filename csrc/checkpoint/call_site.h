// Where a region was called from, for the warning about tensors that were not listed.
#pragma once

#include <pybind11/pybind11.h>

#include <vector>

#include "checkpoint/boundary.h"

namespace memsave_ext {

// An instruction of Python code that calls CheckpointFunction.apply. Made and freed with the GIL.
struct CallSite {
  pybind11::object code;  // null where no Python frame was running
  int instruction = 0;

  static CallSite current();
};

// Issues one UserWarning that names every unlisted tensor, or none if there is none. Throws
// python_error where warnings are errors.
void warn_unlisted(const std::vector<Unlisted>& unlisted, const CallSite& site);

}  // namespace memsave_ext
