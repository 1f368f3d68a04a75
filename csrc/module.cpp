// The Python module memsave_ext._C: names only, every function is defined in its own room.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include "adam/backward.h"
#include "adam/ddp.h"
#include "adam/format_names.h"
#include "adam/given.h"
#include "adam/hook.h"
#include "adam/rows.h"
#include "adam/stepper.h"
#include "checkpoint/apply.h"
#include "checkpoint/checkpoint.h"
#include "checkpoint/engine.h"
#include "checkpoint/errors.h"
#include "checkpoint/forward_record.h"
#include "checkpoint/hooks.h"
#include "checkpoint/recomputing.h"
#include "checkpoint/stepped.h"
#include "memory/active.h"
#include "memory/tracker.h"
#include "remat/bindings.h"

#ifdef MEMSAVE_EXT_WITH_CUDA
#include "report/probe.h"
#endif

namespace {

// Outside pybind11, whose argument handling would cost as much as the rest of a call.
PyMethodDef fast_functions[] = {
    {"checkpoint_apply",
     reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(memsave_ext::checkpoint_apply)),
     METH_FASTCALL, "apply(function, n, *args)"},
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  namespace py = pybind11;

  if (PyModule_AddFunctions(m.ptr(), fast_functions) < 0) throw py::error_already_set();
  m.def("is_recomputing", &memsave_ext::is_recomputing);
  m.def("checkpoint_region", &memsave_ext::checkpoint_region);
  m.def("forward_record_scopes", &memsave_ext::forward_record_scopes);
  m.def("pack_hooks", &memsave_ext::pack_hooks);
  m.def("register_errors", &memsave_ext::register_errors);
  m.def("use_engine_hooks", &memsave_ext::use_engine_hooks);
  m.def("is_any_pending", &memsave_ext::is_any_pending);
  m.def("note_step", &memsave_ext::note_step);
  memsave_ext::init_hooks();
  memsave_ext::remat::bind(m);

  using memsave_ext::memory::Tracker;
  m.def("pause_tracking", &memsave_ext::memory::pause_tracking);
  m.def("listen_to_recomputes", &memsave_ext::memory::listen_to_recomputes);
  py::class_<Tracker>(m, "MemoryTracker")
      .def(py::init<at::Device, bool>())
      .def("start", &Tracker::start)
      .def("stop", &Tracker::stop)
      .def("note", &Tracker::note, py::arg(), py::arg() = 0, py::arg() = 0)
      .def("label",
           py::overload_cast<const std::vector<at::Tensor>&, int64_t, const std::vector<int32_t>&>(
               &Tracker::label))
      .def("look", py::overload_cast<>(&Tracker::look))
      .def("reset_peak", &Tracker::reset_peak)
      .def("take", &Tracker::take)
      .def_property_readonly("live", &Tracker::live)
      .def_property_readonly("peak", &Tracker::peak);
  using memsave_ext::memory::Origin;
  py::class_<Origin, std::shared_ptr<Origin>>(m, "MemoryOrigin")
      .def("frames", &Origin::frames)
      .def_readonly("operator_name", &Origin::operator_name);

  m.def("give_adam_functions", &memsave_ext::adam::give_functions);
  m.def("give_adam_transitions", &memsave_ext::adam::give_transitions);
  m.def("adam_formats", &memsave_ext::adam::describe_formats);
  using memsave_ext::adam::Stepper;
  py::class_<Stepper, std::shared_ptr<Stepper>>(m, "AdamStepper")
      .def(py::init<const py::object&, int64_t, int64_t, bool>())
      .def("attach", &Stepper::attach)
      .def("lost", &Stepper::lost)
      .def_static("owner", &Stepper::owner)
      .def("detach", &Stepper::detach)
      .def("step", &Stepper::step)
      .def("zero_grad", &Stepper::zero_grad)
      .def("begin_loading", &Stepper::begin_loading)
      .def("end_loading", &Stepper::end_loading)
      .def("accumulate", &Stepper::accumulate)
      .def("pause", &Stepper::pause)
      .def("begin_norm_pass", &Stepper::begin_norm_pass)
      .def("end_norm_pass", &Stepper::end_norm_pass)
      .def("folded", &Stepper::folded)
      .def("drop_stale_low_part", &Stepper::drop_stale_low_part)
      .def("grad_norm", &Stepper::grad_norm)
      .def("found_inf", &Stepper::found_inf)
      .def("ask", &Stepper::ask)
      .def("count_used", &Stepper::count_used)
      .def("hand_to_ddp", &memsave_ext::adam::hand_to_ddp)
      .def("begin_reduced", &memsave_ext::adam::begin_reduced)
      .def("step_reduced", &memsave_ext::adam::step_reduced);
  using memsave_ext::adam::Backward;
  py::class_<Backward, std::shared_ptr<Backward>>(m, "AdamBackward");
  using memsave_ext::adam::StepInRows;
  py::class_<StepInRows>(m, "AdamRows")
      .def("step", &StepInRows::step, py::call_guard<py::gil_scoped_release>());
  m.def("begin_adam_rows", &memsave_ext::adam::begin_rows);
  using memsave_ext::adam::DTensorHook;
  py::class_<DTensorHook>(m, "AdamDTensorHook").def("__call__", &DTensorHook::operator());

#ifdef MEMSAVE_EXT_WITH_CUDA
  m.attr("with_cuda") = true;
  m.def("probe_cuda", &memsave_ext::probe_cuda);
#else
  m.attr("with_cuda") = false;
#endif
}
