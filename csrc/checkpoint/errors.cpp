#include "checkpoint/errors.h"

namespace memsave_ext {
namespace {

// Never destroyed: regions outlive static destruction.
auto& errors = *new pybind11::object();

}  // namespace

void register_errors(pybind11::object module) { errors = std::move(module); }

const pybind11::object& registered_errors() { return errors; }

}  // namespace memsave_ext
