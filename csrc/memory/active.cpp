#include "memory/active.h"

#ifndef _WIN32
#include <pthread.h>
#endif

#include <algorithm>
#include <atomic>
#include <utility>

namespace memsave_ext::memory {
namespace py = pybind11;
namespace {

std::vector<Listener*> active;
std::atomic<int> active_count{0};
std::atomic<int> stack_count{0};
// Called with the GIL; null without. It is leaked at exit, when Python may be gone.
std::atomic<py::object*> recompute_listener{nullptr};

bool watching() { return active_count.load(std::memory_order_relaxed) > 0 && paused_depth == 0; }

void set_counts() {
  active_count = static_cast<int>(active.size());
  stack_count = static_cast<int>(std::count_if(active.begin(), active.end(),
                                               [](Listener* one) { return one->takes_stacks(); }));
}

void observe_recompute(Again what, bool begins) {
  const EventContext context = EventContext::now();
  {
    const std::lock_guard<std::mutex> lock(tracking_mutex());
    for (Listener* listener : active) listener->recompute(context, what, begins);
  }
  if (recompute_listener.load(std::memory_order_relaxed) != nullptr) {
    const py::gil_scoped_acquire gil;
    const py::error_scope raised;  // a recompute may end with an exception
    if (const py::object* listener = recompute_listener)
      (*listener)(what == Again::kRegion, begins);
  }
}

void set_observer() {
  const bool observed = !active.empty() || recompute_listener.load() != nullptr;
  recompute_observer = observed ? &observe_recompute : nullptr;
}

// Installs fork handlers. Without them, a child that is forked while another thread holds the mutex
// would wait for it forever. What the child allocates is not tracked.
void survive_forks() {
#ifndef _WIN32
  static const int installed =
      pthread_atfork([] { tracking_mutex().lock(); }, [] { tracking_mutex().unlock(); },
                     [] {
                       active.clear();
                       set_counts();
                       recompute_observer = nullptr;
                       tracking_mutex().unlock();
                     });
  (void)installed;
#endif
}

}  // namespace

std::mutex& tracking_mutex() {
  static auto* mutex = new std::mutex;  // outlives every thread that frees memory
  return *mutex;
}

void add_active(Listener* listener) {
  survive_forks();
  active.push_back(listener);
  set_counts();
  set_observer();
}

void remove_active(Listener* listener) {
  active.erase(std::remove(active.begin(), active.end(), listener), active.end());
  set_counts();
  set_observer();
}

void listen_to_recomputes(std::optional<py::object> listener) {
  py::object* before =
      recompute_listener.exchange(listener ? new py::object(std::move(*listener)) : nullptr);
  {
    const std::lock_guard<std::mutex> lock(tracking_mutex());
    set_observer();
  }
  delete before;
}

bool any_active(c10::DeviceType type) {
  return std::any_of(active.begin(), active.end(),
                     [&](Listener* one) { return one->device().type() == type; });
}

void report_allocated(c10::Device device, void* ptr, int64_t size, std::optional<int64_t> total) {
  if (!watching()) return;
  EventContext context = EventContext::now();
  if (stack_count.load(std::memory_order_relaxed) > 0) {
    context.origin = device.is_cpu() ? origin_here() : origin_of_operator();
  }
  TrackingLock lock;
  for (Listener* listener : active)
    if (listener->device() == device) listener->allocated(context, ptr, size, total, lock);
}

void report_freed(c10::Device device, void* ptr, std::optional<int64_t> total) {
  if (!watching()) return;
  const EventContext context = EventContext::now();
  const std::lock_guard<std::mutex> lock(tracking_mutex());
  for (Listener* listener : active)
    if (listener->device() == device) listener->freed(context, ptr, total);
}

}  // namespace memsave_ext::memory
