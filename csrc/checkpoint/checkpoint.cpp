#include "checkpoint/checkpoint.h"

#include <ATen/core/grad_mode.h>
#include <torch/csrc/Exceptions.h>

#include "checkpoint/call.h"
#include "checkpoint/hooks.h"
#include "checkpoint/region.h"

namespace memsave_ext {

namespace py = pybind11;

py::object checkpoint_region(py::object function, py::object recompute_function,
                             py::tuple arguments, py::object kwargs, bool preserve_rng_state,
                             bool early_stop, bool check_determinism, py::object on_error) {
  HANDLE_TH_ERRORS
  const auto call = [&] {
    PyObject* result =
        PyObject_Call(function.ptr(), arguments.ptr(), kwargs.is_none() ? nullptr : kwargs.ptr());
    if (result == nullptr) throw_python_error();
    return py::reinterpret_steal<py::object>(result);
  };
  if (!at::GradMode::is_enabled()) return call();

  const auto region =
      std::make_shared<Region>(std::move(recompute_function), kwargs, std::move(on_error),
                               RegionOptions{preserve_rng_state, early_stop, check_determinism});
  // Before the hooks: arguments belong to what surrounds the region.
  region->save_arguments(arguments.ptr());
  region->save_surroundings();
  region->note_outside();
  py::object result;
  {
    const AutocastGuard uncached(AutocastState::capture().without_cache());
    const HookGuard hooks(std::make_shared<RegionPacker>(region));
    const RegionScope inside;
    const ForwardRecordScope scope(region->forward_record(), ForwardRecordScope::kRecording);
    result = call();
  }
  region->finish_forward(result.ptr());
  return result;
  END_HANDLE_TH_ERRORS_PYBIND
}

}  // namespace memsave_ext
