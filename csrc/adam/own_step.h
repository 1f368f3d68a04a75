// Steps of an optimizer that is not this package's, by its own step().
#pragma once

#include <c10/util/ArrayRef.h>
#include <pybind11/pybind11.h>

#include "adam/items.h"
#include "adam/parameter.h"

namespace memsave_ext::adam {

// Steps these prepared parameters, which lie on one device. `optimizer` is a weak reference. Takes
// the GIL; the caller may hold the stepper's mutex, since nobody waits for that with the GIL.
void step_by_own(const pybind11::object& optimizer, c10::ArrayRef<Parameter*> parameters,
                 const Scaling& scaling);

}  // namespace memsave_ext::adam
