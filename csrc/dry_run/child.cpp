#include "dry_run/child.h"

#include <pybind11/pybind11.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstdint>
#include <vector>

#include "checkpoint/hooks.h"

namespace memsave_ext::dry_run {

namespace {

// Python clears the states of threads that a child does not have. What only they held, as objects
// in a threading.local, would be destroyed there: files removed, threads waited for.
void keep_what_other_threads_hold() {
  PyThreadState* const own = PyThreadState_Get();
  auto* thread = PyInterpreterState_ThreadHead(PyThreadState_GetInterpreter(own));
  for (; thread; thread = PyThreadState_Next(thread)) {
    if (thread == own) continue;
    Py_XINCREF(thread->dict);
    Py_XINCREF(thread->context);
    Py_XINCREF(thread->exc_state.exc_value);
  }
}

}  // namespace

int fork_child() {
  // No bytecode may run between these, as it may wait for a thread that the child does not have.
  PyOS_BeforeFork();
  const pid_t child = fork();
  if (child == 0) {
    keep_what_other_threads_hold();
    PyOS_AfterFork_Child();
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    checkpoint::run_backwards_alone();
    return 0;
  }
  const int error = errno;
  PyOS_AfterFork_Parent();
  if (child < 0) {
    errno = error;
    PyErr_SetFromErrno(PyExc_OSError);
    throw pybind11::error_already_set();
  }
  return child;
}

namespace {

namespace py = pybind11;

// What is before each object that the garbage collector knows, in CPython 3.8 to 3.13. A generation
// is a ring of these, with a head that is before no object; their heads lie in one array.
struct Link {
  uintptr_t next, previous;
};
struct Generation {
  Link head;
  int threshold, count;
};

Link* link_of(PyObject* object) { return reinterpret_cast<Link*>(object) - 1; }

Link* without_flags(uintptr_t link) {
  constexpr uintptr_t kFlags = 3;
  return reinterpret_cast<Link*>(link & ~kFlags);
}

Link* next_of(const Link* link) { return without_flags(link->next); }
Link* previous_of(const Link* link) { return without_flags(link->previous); }

// Returns the objects of the oldest generation, in which `one` is; nothing where the collector is
// not laid out like this.
std::vector<PyObject*> oldest_objects(PyObject* one) {
  const py::list youngest;
  const auto* generations = reinterpret_cast<Generation*>(next_of(link_of(youngest.ptr())));
  const Link* const head = &generations[2].head;
  std::vector<PyObject*> found;
  bool is_head_met = false;
  const auto meet = [&](Link* link) {
    if (link == head) {
      is_head_met = true;
    } else {
      found.push_back(reinterpret_cast<PyObject*>(link + 1));
    }
  };
  // Both ways around the ring: most of the time is what memory takes to bring the next link, and
  // these are two at a time.
  Link *forward = link_of(one), *backward = previous_of(forward);
  meet(forward);
  while (forward != backward) {
    meet(backward);
    forward = next_of(forward);
    if (forward == backward) break;
    meet(forward);
    backward = previous_of(backward);
  }
  if (!is_head_met) found.clear();
  return found;
}

}  // namespace

py::list instances(const py::type& kind, const py::type& other) {
  const py::module_ gc = py::module_::import("gc");
  gc.attr("freeze")();  // all generations, which are one then
  gc.attr("unfreeze")();
  auto objects = oldest_objects(gc.ptr());
  py::list listed;
  if (objects.empty()) {
    listed = gc.attr("get_objects")();
    for (const auto& object : listed) objects.push_back(object.ptr());
  }
  py::list found;
  auto* const one = reinterpret_cast<PyTypeObject*>(kind.ptr());
  auto* const another = reinterpret_cast<PyTypeObject*>(other.ptr());
  // By the type alone: other objects may do anything when they are asked for their class.
  for (PyObject* object : objects) {
    auto* const type = Py_TYPE(object);
    if (PyType_IsSubtype(type, one) || PyType_IsSubtype(type, another)) found.append(object);
  }
  return found;
}

}  // namespace memsave_ext::dry_run
