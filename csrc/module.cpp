// The Python module memsave_ext._C: names only, every function is defined in its own room.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include "adam/backward.h"
#include "adam/batch.h"
#include "adam/begin_rows.h"
#include "adam/collector.h"
#include "adam/hook.h"
#include "adam/ops.h"
#include "adam/rows.h"
#include "checkpoint/forward_record.h"
#include "checkpoint/function.h"
#include "checkpoint/hooks.h"
#include "checkpoint/recomputing.h"
#include "checkpoint/region.h"
#include "checkpoint/rules.h"
#include "checkpoint/stepped.h"
#include "dry_run/child.h"
#include "errors.h"
#include "memory/active.h"
#include "memory/cpu_allocator.h"
#include "memory/tracker.h"
#include "remat/bindings.h"

#ifdef MEMSAVE_EXT_WITH_CUDA
#include "report/probe.h"
#include "store/managed.h"
#endif

namespace {

// Outside pybind11, whose argument handling would cost as much as the rest of a call, or whose
// translation of errors is not torch's.
PyMethodDef fast_functions[] = {
    {"checkpoint_apply",
     reinterpret_cast<PyCFunction>(
         reinterpret_cast<void (*)()>(memsave_ext::checkpoint::checkpoint_apply)),
     METH_FASTCALL, "apply(function, n, *args)"},
    {"run_backward",
     reinterpret_cast<PyCFunction>(
         reinterpret_cast<void (*)()>(memsave_ext::checkpoint::run_backward)),
     METH_VARARGS | METH_KEYWORDS, "run_backward(tensors, grad_tensors, keep_graph, ...)"},
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  namespace py = pybind11;

  if (PyModule_AddFunctions(m.ptr(), fast_functions) < 0) throw py::error_already_set();
  m.def("is_recomputing", &memsave_ext::checkpoint::is_recomputing);
  m.def("checkpoint_region", &memsave_ext::checkpoint::checkpoint_region);
  m.def("forward_record_scopes", &memsave_ext::checkpoint::forward_record_scopes);
  m.def("pack_hooks", &memsave_ext::checkpoint::pack_hooks);
  m.def("register_functions", &memsave_ext::register_functions);
  m.def("use_engine_hooks", &memsave_ext::checkpoint::use_engine_hooks);
  m.def("fork_child", &memsave_ext::dry_run::fork_child);
  m.def("instances", &memsave_ext::dry_run::instances);
  m.def("give_checkpoint_rules", &memsave_ext::checkpoint::give_rules);
  m.def("is_any_pending", &memsave_ext::checkpoint::is_any_pending);
  m.def("note_step", &memsave_ext::checkpoint::note_step);
  memsave_ext::checkpoint::init_hooks();
  memsave_ext::remat::bind(m);

  using memsave_ext::memory::Tracker;
  m.def("pause_tracking", &memsave_ext::memory::pause_tracking);
  m.def("hold_cpu_allocator", &memsave_ext::memory::hold_cpu_allocator);
  m.def("end_memory_reading", &memsave_ext::memory::end_reading,
        py::call_guard<py::gil_scoped_release>());
  m.def("release_cpu_allocator", &memsave_ext::memory::release_cpu_allocator);
  m.def("listen_to_recomputes", &memsave_ext::memory::listen_to_recomputes);
  py::class_<Tracker>(m, "MemoryTracker")
      .def(py::init<at::Device, bool>())
      .def("start", &Tracker::start)
      .def("check_stop", &Tracker::check_stop)
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

  m.def("adam_combinations", &memsave_ext::adam::combinations);
  using memsave_ext::adam::Collector;
  py::class_<Collector, std::shared_ptr<Collector>>(m, "AdamCollector")
      .def(py::init<const py::object&, int64_t, int64_t, bool>())
      .def("__enter__",
           [](py::object self) {
             self.cast<Collector&>().lock();
             return self;
           })
      .def("__exit__", [](Collector& self, const py::args&) { self.unlock(); })
      .def("attach", &Collector::attach)
      .def("lost", &Collector::lost)
      .def_static("owner", &Collector::owner)
      .def("detach", &Collector::detach)
      .def("release", &Collector::release)
      .def("set_intake", &Collector::set_intake)
      .def("expect", &Collector::expect)
      .def("any_gradient", &Collector::any_gradient)
      .def("drop_gradients", &Collector::drop_gradients)
      .def("forget_gradients", &Collector::forget_gradients)
      .def("dtensors", &Collector::dtensors)
      .def("remaining", &Collector::remaining)
      .def("drop_used", &Collector::drop_used)
      .def("next_step", &Collector::next_step)
      .def("drop_stale_low_part", &Collector::drop_stale_low_part)
      .def("count_used", &Collector::count_used)
      .def("runs_backward", &Collector::runs_backward)
      .def("current_backward", &Collector::current_backward)
      .def("check_reduced", &Collector::check_reduced)
      .def("hand_to_ddp", &Collector::hand_to_ddp);
  using memsave_ext::adam::Batch;
  py::class_<Batch>(m, "AdamBatch")
      .def("__len__", &Batch::size)
      .def_property_readonly("device", &Batch::device)
      .def_property_readonly("params", &Batch::params)
      .def_property_readonly("groups", &Batch::groups)
      .def_property_readonly("asks", &Batch::asks)
      .def("asking", &Batch::asking)
      .def("select", &Batch::select)
      .def("squares", &Batch::squares)
      .def("squares_of_each", &Batch::squares_of_each)
      .def("put_gradients", &Batch::put_gradients)
      .def("note_steps", &Batch::note_steps)
      .def("step", &Batch::step);
  using memsave_ext::adam::Backward;
  py::class_<Backward, std::shared_ptr<Backward>>(m, "AdamBackward")
      .def_property_readonly("action", &Backward::action_name)
      .def("step_reduced", &Backward::step_reduced);
  using memsave_ext::adam::StepInRows;
  py::class_<StepInRows>(m, "AdamRows")
      .def("step", &StepInRows::step, py::call_guard<py::gil_scoped_release>());
  m.def("begin_adam_rows", &memsave_ext::adam::begin_rows);
  using memsave_ext::adam::DTensorHook;
  py::class_<DTensorHook>(m, "AdamDTensorHook").def("__call__", &DTensorHook::operator());

#ifdef MEMSAVE_EXT_WITH_CUDA
  m.attr("with_cuda") = true;
  m.def("probe_cuda", &memsave_ext::probe_cuda);
  m.def("managed_memory", &memsave_ext::store::managed_memory);
  m.def("managed_owner", &memsave_ext::store::managed_owner);
  m.def("move_managed", &memsave_ext::store::move_managed);
#else
  m.attr("with_cuda") = false;
#endif
}
